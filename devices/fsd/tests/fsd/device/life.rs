//! Life and death of a device and its server.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::time::{Duration, Instant};

use devices::executor::Executor;
use devices::snapshot::{RestoreError, Stateful};
use devices::testing::{Conformance, PATIENCE, eventually, metric};
use devices::virtio::fs::{Fs, FsConfig, Policy};
use tempfile::tempdir;

use super::{Driven, config, mounted, moved, of_device, server_of};
use crate::cold::tree;
use crate::guest::{Answers, BOTH, Guest, READ, ROOT};
use crate::hostile::{Cage, messages_that_are_none, names_that_lead_away, noise};

#[test]
fn conforms() {
    let share = tempdir().unwrap();
    Conformance::new(|executor| Box::new(Fs::new(executor, config(share.path())).unwrap()))
        .exercise(|driver| {
            let mut guest = Guest::new(());
            let init = guest.message(26, 0, &[&[7, 0, 0, 0, 38][..], &[0; 59]].concat());
            let (request, reply) = (driver.alloc_with(&init), driver.alloc(80));
            let buffers = [
                devices::testing::Buffer::readable(request, init.len() as u32),
                devices::testing::Buffer::writable(reply, 80),
            ];
            assert_eq!(driver.exchange(1, &buffers), 80);
            assert_eq!(driver.bytes(reply, 8), [80, 0, 0, 0, 0, 0, 0, 0]);
        })
        .answers(&[0, 1])
        .thinned(40)
        .run();
}

#[test]
fn the_tag_and_the_number_of_queues_are_in_the_configuration_space() {
    let share = tempdir().unwrap();
    let mut server = Driven::start(config(share.path())).unwrap();
    let tag = [&b"work"[..], &[0; 32]].concat();
    assert_eq!(server.driver.config(0, 36), tag);
    assert_eq!(server.driver.config(36, 4), [1, 0, 0, 0]);
}

#[test]
fn a1_b2_an_open_file_is_written_on_after_a_restore() {
    let share = tempdir().unwrap();
    let mut guest = mounted(config(share.path()));
    let (node, handle) = guest.create(ROOT, "f", BOTH).unwrap();
    guest.write(node, handle, 0, &[1; 4096]).unwrap();
    let mut guest = moved(guest, config(share.path())).unwrap();
    guest.write(node, handle, 4096, &[2; 4096]).unwrap();
    let expected = [[1; 4096], [2; 4096]].concat();
    assert_eq!(fs::read(share.path().join("f")).unwrap(), expected);
}

#[test]
fn c1_an_open_file_without_a_name_outlives_its_server() {
    let share = tempdir().unwrap();
    let mut guest = mounted(config(share.path()));
    let (node, handle) = guest.create(ROOT, "gone", BOTH).unwrap();
    let data: Vec<u8> = (0..1 << 20).map(|n: u32| (n % 251) as u8).collect();
    for (at, piece) in (0..).step_by(128 << 10).zip(data.chunks(128 << 10)) {
        guest.write(node, handle, at, piece).unwrap();
    }
    guest.unlink(ROOT, "gone").unwrap();
    let mut guest = moved(guest, config(share.path())).unwrap();
    for (at, piece) in (0..).step_by(128 << 10).zip(data.chunks(128 << 10)) {
        assert_eq!(guest.read(node, handle, at, 128 << 10).unwrap(), piece);
    }
    assert_eq!(guest.getattr(node).unwrap().nlink, 0);
    assert_eq!(fs::read_dir(share.path()).unwrap().count(), 0);
}

#[test]
fn h1_a_read_only_share_is_mounted_so_and_stays_so() {
    let share = tempdir().unwrap();
    fs::write(share.path().join("f"), "x").unwrap();
    let read_only = || FsConfig { read_only: true, ..config(share.path()) };
    let mut guest = mounted(read_only());
    let node = guest.lookup(ROOT, "f").unwrap().node;
    let handle = guest.open(node, READ).unwrap();
    assert_eq!(guest.mkdir(ROOT, "d"), Err(libc::EROFS));
    let mut guest = moved(guest, read_only()).unwrap();
    assert_eq!(guest.read(node, handle, 0, 9).unwrap(), b"x");
    assert_eq!(guest.mkdir(ROOT, "d"), Err(libc::EROFS));
}

#[test]
fn h2_the_records_of_two_shares_cannot_be_swapped() {
    let (one, two) = (tempdir().unwrap(), tempdir().unwrap());
    let (record, _) = mounted(config(one.path())).server.stop();
    let executor = Executor::spawn("test-fs").unwrap();
    let other = FsConfig { tag: "other".into(), ..config(two.path()) };
    let first = Fs::new(executor.handle(), config(two.path())).unwrap();
    let mut driver = devices::testing::GuestDriver::new(Box::new(first));
    let other = Fs::new(executor.handle(), other).unwrap();
    let refused = driver.replace(Box::new(other), record.clone()).unwrap_err();
    assert!(refused.to_string().contains("the share is \"other\""), "{refused}");
    let same_tag = Fs::new(executor.handle(), config(two.path())).unwrap();
    let refused = driver.replace(Box::new(same_tag), record).unwrap_err();
    assert!(refused.to_string().contains("different directory"), "{refused}");
}

#[test]
fn i1_another_directory_takes_the_place_of_a_share() {
    let (one, two) = (tempdir().unwrap(), tempdir().unwrap());
    fs::write(one.path().join("f"), "one").unwrap();
    fs::write(two.path().join("f"), "two").unwrap();
    let mut guest = mounted(config(one.path()));
    let node = guest.lookup(ROOT, "f").unwrap().node;
    let handle = guest.open(node, READ).unwrap();
    let remap = FsConfig { policy: Policy::Remap, ..config(two.path()) };
    let mut guest = moved(guest, remap).unwrap();
    assert_eq!(guest.read(node, handle, 0, 9), Err(libc::ESTALE));
    let fresh = guest.lookup(ROOT, "f").unwrap().node;
    let handle = guest.open(fresh, READ).unwrap();
    assert_eq!(guest.read(fresh, handle, 0, 9).unwrap(), b"two");
}

#[test]
fn j1_a_directory_that_cannot_be_served_is_named() {
    let share = tempdir().unwrap();
    fs::write(share.path().join("file"), "x").unwrap();
    let started = Instant::now();
    for (name, words) in [("missing", "No such file"), ("file", "Not a directory")] {
        let refused = Driven::start(config(&share.path().join(name)));
        let refused = refused.err().expect("it is refused").to_string();
        assert!(refused.contains("\"work\"") && refused.contains(name), "{refused}");
        assert!(refused.contains(words), "{refused}");
    }
    let mut without = config(share.path());
    without.program = share.path().join("nothing");
    let refused = Driven::start(without).err().expect("it is refused").to_string();
    assert!(refused.contains("nothing") && refused.contains("--fsd"), "{refused}");
    assert!(started.elapsed() < PATIENCE);
    assert_eq!(server_of(share.path()), None);
}

#[test]
fn m4_the_mount_is_answered_as_it_was() {
    let share = tempdir().unwrap();
    let acl = || FsConfig { acl: true, ..config(share.path()) };
    let mut guest = mounted(acl());
    let node = guest.mkdir(ROOT, "d").unwrap().node;
    let mut guest = moved(guest, acl()).unwrap();
    guest.setxattr(node, "user.after", b"2", true).unwrap();
    assert_eq!(guest.getxattr(node, "user.after").unwrap(), b"2");
}

#[test]
fn a_rate_limit_holds_requests_back_and_loses_none() {
    let share = tempdir().unwrap();
    let operations = "50/100ms".parse().ok();
    let rate = devices::rate_limiter::RateLimit { bytes: None, operations };
    let mut guest = mounted(FsConfig { rate, ..config(share.path()) });
    let meter = guest.server.meter.clone();
    let started = Instant::now();
    for _ in 0..150 {
        assert!(guest.getattr(ROOT).is_ok());
    }
    // The bucket holds 50, and one of them was the mount's.
    assert!(started.elapsed() >= Duration::from_millis(180), "{:?}", started.elapsed());
    assert!(metric(&*meter, "fs_throttled_total") >= 2);
    // The other queue is for forgets, and no way around it.
    let started = Instant::now();
    for _ in 0..150 {
        let message = guest.message(3, ROOT, &[0; 16]);
        assert!(guest.server.ask_urgently(&message, 120).len() > 16);
    }
    assert!(started.elapsed() >= Duration::from_millis(180), "{:?}", started.elapsed());
    let mut guest = moved(guest, FsConfig { rate, ..config(share.path()) }).unwrap();
    assert!(guest.getattr(ROOT).is_ok());
}

#[test]
fn s3_the_guests_root_is_somebody_else_on_the_host() {
    let share = tempdir().unwrap();
    chown(share.path(), Some(100_000), Some(200_000)).unwrap();
    // Whatever the file mode creation mask is, which servers in this process may have changed.
    fs::set_permissions(share.path(), Permissions::from_mode(0o755)).unwrap();
    let mapped = || FsConfig {
        uid_map: "0:100000:1000".parse().ok(),
        gid_map: "0:200000:1000".parse().ok(),
        ..config(share.path())
    };
    let mut guest = mounted(mapped());
    let node = guest.mkdir(ROOT, "d").unwrap().node;
    let refused = super::moved(mounted(mapped()), config(share.path())).err().unwrap().to_string();
    assert!(refused.contains("uid_map was 0:100000:1000 and is none"), "{refused}");
    let mut guest = moved(guest, mapped()).unwrap();
    assert_eq!(guest.getattr(node).unwrap().uid, 0);
    guest.uid = 5;
    assert_eq!(guest.mkdir(ROOT, "theirs").map(|_| ()), Err(libc::EACCES));
    let seen = fs::metadata(share.path().join("d")).unwrap();
    assert_eq!((seen.uid(), seen.gid()), (100_000, 200_000));
}

#[test]
fn n3_at_a_pause_nothing_is_on_its_way_and_nothing_is_written_after_it() {
    let share = tempdir().unwrap();
    let mut guest = mounted(config(share.path()));
    for round in 0..20_u16 {
        let message = guest.message(3, ROOT, &[0; 16]);
        let server = &mut guest.server;
        let count = |server: &Driven, name: &str| metric(&*server.meter, name);
        server.send(&message, 128);
        server.driver.pause();
        // What was taken was answered: 104 bytes are the mount's, 56 those of each message.
        let taken = (count(server, "fs_sent_bytes_total") - 104) / 56 + 1;
        assert_eq!(count(server, "fs_requests_total"), taken, "round {round}");
        assert_eq!(u64::from(server.driver.used_index(1)), taken, "round {round}");
        let memory =
            |server: &Driven| server.driver.bytes(devices::memory::GuestAddress(0), 4 << 20);
        let before = memory(server);
        std::thread::sleep(Duration::from_millis(5));
        assert!(memory(server) == before, "guest memory has changed");
        server.driver.resume();
        server.driver.wait_used(1);
    }
    assert!(guest.lookup(ROOT, "nothing").is_err());
}

#[test]
fn n2_a_request_that_is_stuck_fails_the_save_by_name_and_goes_on() {
    let share = tempdir().unwrap();
    let brief = FsConfig { drain: Duration::from_millis(200), ..config(share.path()) };
    let mut guest = mounted(brief);
    let pid = server_of(share.path()).unwrap();
    // SAFETY: a signal to a process that this one has started.
    let signal = |signal| assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    signal(libc::SIGSTOP);
    let message = guest.message(3, ROOT, &[0; 16]);
    let server = &mut guest.server;
    server.send(&message, 128);
    let meter = server.meter.clone();
    assert!(eventually(PATIENCE, || metric(&*meter, "fs_sent_bytes_total") == 104 + 56));
    server.driver.pause();
    let refused = server.driver.try_save().unwrap_err().to_string();
    assert!(refused.contains("\"work\"") && refused.contains("GETATTR of node 1"), "{refused}");
    server.driver.resume();
    signal(libc::SIGCONT);
    assert_eq!(server.driver.wait_used(1).len, 120);
    server.driver.pause();
    assert!(server.driver.try_save().is_ok());
}

#[test]
fn the_server_ends_with_its_device() {
    let share = tempdir().unwrap();
    let guest = mounted(config(share.path()));
    assert!(server_of(share.path()).is_some());
    drop(guest);
    assert!(eventually(PATIENCE, || server_of(share.path()).is_none()));
}

#[test]
fn o1_a_chain_of_five_generations() {
    let share = tempdir().unwrap();
    let mut guest = mounted(config(share.path()));
    let (node, handle) = guest.create(ROOT, "f", BOTH).unwrap();
    for generation in 0..5_u8 {
        guest = moved(guest, config(share.path())).unwrap();
        guest.write(node, handle, generation.into(), &[generation]).unwrap();
    }
    assert_eq!(fs::read(share.path().join("f")).unwrap(), [0, 1, 2, 3, 4]);
}

#[test]
fn p1_many_copies_share_a_directory_and_the_end_of_one_disturbs_no_other() {
    let copies = std::env::var("CUBE_COPIES").ok().and_then(|text| text.parse().ok());
    let copies = copies.unwrap_or(10_usize);
    let share = tempdir().unwrap();
    let mut guest = mounted(config(share.path()));
    let open: Vec<_> = (0..50_u8)
        .map(|n| {
            let (node, handle) = guest.create(ROOT, &format!("f{n}"), BOTH).unwrap();
            guest.write(node, handle, 0, &[n]).unwrap();
            (node, handle)
        })
        .collect();
    tree(&mut guest, 10, 100);
    let (record, driver) = guest.server.stop();
    let record = of_device(&record);
    let mut times = Vec::new();
    let restored = |_| {
        let (driven, took) = Driven::restored(config(share.path()), record.clone());
        times.push(took);
        Guest::new(driven)
    };
    let mut guests: Vec<_> = (0..copies).map(restored).collect();
    times.sort();
    println!("{copies} copies that know 1060 files: restored in {:?} (median)", times[copies / 2]);
    drop(driver);
    drop(guests.pop());
    for guest in &mut guests {
        for ((node, handle), byte) in open.iter().zip(0_u8..) {
            assert_eq!(guest.read(*node, *handle, 0, 9).unwrap(), [byte]);
        }
    }
    assert_eq!(guests.len(), copies - 1);
}

#[test]
fn q3_a_record_that_was_damaged_is_refused_and_the_device_is_as_before() {
    let share = tempdir().unwrap();
    let executor = Executor::spawn("test-fs").unwrap();
    let mut device = Fs::new(executor.handle(), config(share.path())).unwrap();
    let record = device.save_record().unwrap();
    let mut damaged = record.clone();
    let text = format!("{:?}", damaged.state);
    assert!(text.contains("work"), "{text}");
    let fields = damaged.state.as_map_mut().unwrap();
    for (name, value) in fields {
        if name.as_text() == Some("share") {
            value.as_bytes_mut().unwrap()[20] ^= 1;
        }
    }
    let refused = device.restore_record(damaged).unwrap_err();
    assert!(matches!(refused, RestoreError::Refused { .. }), "{refused}");
    assert!(refused.to_string().contains("checksum"), "{refused}");
    assert_eq!(device.save_record().unwrap(), record);
}

#[test]
fn r1_names_that_lead_away_are_refused() {
    let cage = Cage::new();
    let mut guest = mounted(config(&cage.share()));
    names_that_lead_away(&mut guest);
    cage.holds();
}

#[test]
fn r2_messages_that_are_none_get_an_error_and_the_next_one_its_answer() {
    let cage = Cage::new();
    let mut guest = mounted(config(&cage.share()));
    messages_that_are_none(&mut guest);
    // Longer than what is passed on.
    let long = guest.message(16, ROOT, &[0; 200 << 10]);
    assert_eq!(guest.server.ask(&long, 64).len(), 16);
    cage.holds();
}

#[test]
fn r6_noise_is_survived() {
    let cage = Cage::new();
    let mut guest = mounted(config(&cage.share()));
    let pid = server_of(&cage.share());
    noise(&mut guest, 3000, 0x1234_5678_9abc_def1);
    assert_eq!(server_of(&cage.share()), pid);
    assert!(guest.lookup(ROOT, "d").is_ok());
    cage.holds();
}
