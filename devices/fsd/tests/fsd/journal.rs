//! What a server leaves to the next one.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use cube_fsd::journal::Journal;
use cube_fsd::state::{Mount, State};
use tempfile::{tempdir, tempfile};

use crate::guest::{BOTH, Guest, READ, ROOT};
use crate::local::Local;

const LEN: u64 = 4096 + 2 * (16 << 20);

fn file() -> File {
    let file = tempfile().unwrap();
    file.set_len(LEN).unwrap();
    file
}

fn read(file: &File) -> Option<State> {
    Journal::open(file.try_clone().unwrap()).unwrap().read().unwrap()
}

/// What is known, without the content of files that have no name.
fn known(guest: &mut Guest<Local>) -> Mount {
    let state = State::parse(&guest.server.save()).unwrap();
    Mount { orphans: Vec::new(), ..state.mount.unwrap() }
}

/// Numbers that look random.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end as u64) as usize
    }
}

/// Does something, well or not: what fails is part of it.
fn act(guest: &mut Guest<Local>, numbers: &mut Numbers, open: &mut Vec<(u64, u64, bool)>) {
    let names = ["a", "b", "c", "d", "e"];
    let mut name = || names[numbers.below(names.len())];
    let (one, other) = (name(), name());
    let nodes: Vec<u64> = known(guest).nodes.iter().map(|node| node.id).collect();
    let mut node = || nodes[numbers.below(nodes.len())];
    let (at, to) = (node(), node());
    let _ = match numbers.below(14) {
        0 | 1 => guest.lookup(at, one).map(drop),
        2 => guest.mkdir(at, one).map(drop),
        3 => guest.create(at, one, BOTH).map(|(node, handle)| open.push((node, handle, false))),
        4 => guest.unlink(at, one),
        5 => guest.rmdir(at, one),
        6 => guest.rename((at, one), (to, other), 0),
        7 => guest.rename((at, one), (to, other), libc::RENAME_EXCHANGE),
        8 => guest.link(to, at, one).map(drop),
        9 => guest.open(at, READ).map(|handle| open.push((at, handle, false))),
        10 => guest.opendir(at).map(|handle| open.push((at, handle, true))),
        11 => match open.pop() {
            Some((node, handle, true)) => guest.releasedir(node, handle),
            Some((node, handle, false)) => guest.release(node, handle),
            None => Ok(()),
        },
        12 => {
            guest.forget(at, 1);
            Ok(())
        }
        _ => guest.list(at).map(drop),
    };
}

#[test]
fn k6_what_is_kept_is_what_is_known_whatever_the_guest_does() {
    let (share, file) = (tempdir().unwrap(), file());
    let mut guest = Guest::new(Local::keeping(share.path(), &file).unwrap());
    assert_eq!(read(&file), None);
    guest.mount();
    let (mut numbers, mut open) = (Numbers(0x9e37_79b9_7f4a_7c15), Vec::new());
    let rounds = std::env::var("CUBE_FUZZ").ok().and_then(|text| text.parse().ok());
    for round in 0..rounds.unwrap_or(600) {
        act(&mut guest, &mut numbers, &mut open);
        assert_eq!(read(&file).unwrap().mount, Some(known(&mut guest)), "round {round}");
        if round % 100 == 99 {
            // All that it has a name for is as it was.
            let before = known(&mut guest);
            let server = Local::keeping(share.path(), &file).unwrap();
            let mut next = guest.with(server);
            let after = known(&mut next);
            assert_eq!(
                (after.next_node, after.handles.len()),
                (before.next_node, before.handles.len())
            );
            for (was, is) in before.nodes.iter().zip(&after.nodes) {
                assert_eq!((was.id, was.lookups, &was.names), (is.id, is.lookups, &is.names));
                assert!(is.tombstone == (was.tombstone || was.names.is_empty() && was.id != ROOT));
            }
            guest = next;
        }
    }
    assert!(known(&mut guest).nodes.len() > 5);
}

#[test]
fn k6_a_server_that_dies_in_a_write_leaves_what_was_before_it() {
    let (share, file) = (tempdir().unwrap(), file());
    fs::write(share.path().join("f"), "x").unwrap();
    let mut guest = Guest::new(Local::keeping(share.path(), &file).unwrap());
    guest.mount();
    let mut states = vec![read(&file)];
    let begin = end(&file);
    for name in ["a", "b"] {
        guest.mkdir(ROOT, name).unwrap();
        states.push(read(&file));
    }
    let all = (begin..end(&file)).collect::<Vec<_>>();
    for &cut in all.iter().rev() {
        file.write_all_at(&[0], cut).unwrap();
        let left = read(&file);
        assert!(states.contains(&left), "cut at {cut}: {left:?}");
    }
    assert_eq!(read(&file), states[0]);
}

/// Where the last byte is that is not zero, and one more.
fn end(file: &File) -> u64 {
    let mut bytes = vec![0; 64 << 10];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes.iter().rposition(|byte| *byte != 0).unwrap() as u64 + 1
}

#[test]
fn k6_what_was_forged_is_refused_or_harmless() {
    let (share, file) = (tempdir().unwrap(), file());
    let mut guest = Guest::new(Local::keeping(share.path(), &file).unwrap());
    guest.mount();
    let begin = end(&file);
    let d = guest.mkdir(ROOT, "d").unwrap().node;
    guest.create(d, "f", BOTH).unwrap();
    guest.rename((d, "f"), (ROOT, "g"), 0).unwrap();
    let (mut good, mut numbers) = (vec![0; (end(&file) - begin) as usize], Numbers(77));
    file.read_exact_at(&mut good, begin).unwrap();
    let (mut refused, mut taken) = (0, 0);
    for _ in 0..2000 {
        let mut bad = good.clone();
        let at = numbers.below(bad.len());
        bad[at] = numbers.below(256) as u8;
        file.write_all_at(&bad, begin).unwrap();
        match Journal::open(file.try_clone().unwrap()).unwrap().read() {
            Ok(Some(state)) => {
                taken += 1;
                assert!(state.checked().is_ok());
            }
            Ok(None) => panic!("the checkpoint is as it was"),
            Err(_) => refused += 1,
        }
    }
    assert!(refused > 100 && taken > 100, "{refused} refused, {taken} taken");
}

#[test]
fn k6_a_journal_does_not_grow_for_ever() {
    let (share, file) = (tempdir().unwrap(), file());
    fs::write(share.path().join("f"), "x").unwrap();
    let mut journal = Journal::open(file.try_clone().unwrap()).unwrap();
    let mut guest = Guest::new(Local::keeping(share.path(), &file).unwrap());
    guest.mount();
    let state = guest.server.save();
    let mut checkpoints = 0;
    for _ in 0..1000 {
        if !journal.has_room() {
            journal.begin(&state).unwrap();
            checkpoints += 1;
        }
        journal.append(&[1; 60_000]).unwrap();
    }
    assert!((10..20).contains(&checkpoints), "{checkpoints}");
    let blocks = std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap());
    assert!(blocks * 512 < 6 << 20, "{blocks}");
    journal.begin(&state).unwrap();
    assert_eq!(read(&file), Some(State::parse(&state).unwrap()));
    journal.give_up();
    assert_eq!(read(&file), None);
}
