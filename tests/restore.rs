//! How a snapshot becomes a VM: where its memory comes from, which files of the host it may have, and
//! what is refused. With the guest that counts, on every KVM.

#![allow(clippy::unwrap_used, clippy::panic, missing_docs, reason = "tests fail by panics")]

#[path = "restore/given_back.rs"]
mod given_back;

use std::fs::{self, File};
use std::io::{IoSliceMut, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use harness::Running;
use harness::counter::{Counter, before, follows, goes_on, may_skip};
use hypervisor::uffd::{Event, Uffd};
use nix::sys::signal::Signal;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};

/// Bytes of a page.
const PAGE: u64 = 4096;
/// What `cube-vmm restore` exits with when memory cannot be brought in any more.
const MEMORY_LOST: i32 = 118;
/// And when the guest does not get ready.
const NOT_READY: i32 = 117;

/// A snapshot of a guest that has ended, and its last letter.
fn saved() -> (Counter, char) {
    saved_with(&[])
}

/// The same, of which the disk stays outside.
fn saved_without_its_disk() -> (Counter, char) {
    saved_with(&["--disk-clone", "data=none"])
}

fn saved_with(options: &[&str]) -> (Counter, char) {
    let counter = Counter::new();
    let original = counter.start("mmio");
    let words = ["snapshot", "api", counter.dir(), "--keep-paused"];
    counter.ask(&[&words[..], options].concat()).output(0);
    let last = follows('a', &counter.end("api", original));
    (counter, last)
}

/// The guest goes on from where it was.
fn assert_goes_on(counter: &Counter, last: char, copy: Running) {
    goes_on(&copy);
    follows(last, &counter.end("copy", copy));
}

#[test]
fn memory_comes_in_when_it_is_touched_or_before() {
    if may_skip() {
        return;
    }
    for mode in ["private", "prefault", "uffd"] {
        let (counter, last) = saved();
        let copy = counter.restore("copy", &["--resume", "--memory-mode", mode]);
        assert_goes_on(&counter, last, copy);
    }
}

#[test]
fn a_guest_whose_memory_comes_page_by_page_can_be_saved_at_once() {
    if may_skip() {
        return;
    }
    let (mut counter, last) = saved();
    let copy = counter.restore("copy", &["--resume", "--memory-mode", "uffd"]);
    goes_on(&copy);
    counter.dir = counter.place.given_path("again");
    counter.ask(&["snapshot", "copy", counter.dir(), "--keep-paused"]).output(0);
    let last = follows(last, &counter.end("copy", copy));
    let third = counter.restore("copy", &["--resume"]);
    assert_goes_on(&counter, last, third);
}

/// A page fault handler: what it was handed, on its connection.
struct Handed {
    stream: UnixStream,
    uffd: Uffd,
    image: File,
    regions: Vec<serde_json::Value>,
}

/// Waits for a VMM and takes what it hands over.
fn take_over(listener: &UnixListener) -> Handed {
    let (stream, _) = listener.accept().unwrap();
    let mut line = vec![0; 65536];
    let mut space = nix::cmsg_space!([RawFd; 2]);
    let (len, fds) = {
        let mut part = [IoSliceMut::new(&mut line)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let got = recvmsg::<()>(stream.as_raw_fd(), &mut part, Some(&mut space), flags).unwrap();
        let fds: Vec<RawFd> = got
            .cmsgs()
            .unwrap()
            .flat_map(|message| match message {
                ControlMessageOwned::ScmRights(fds) => fds,
                _ => Vec::new(),
            })
            .collect();
        (got.bytes, fds)
    };
    // SAFETY: the kernel has just made these descriptors for us.
    let mut fds = fds.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
    let uffd = Uffd::from(fds.next().unwrap());
    let image = File::from(fds.next().unwrap());
    let handover: serde_json::Value = serde_json::from_slice(&line[..len]).unwrap();
    assert_eq!((&handover["format"], &handover["version"]), (&"cubevmm-uffd".into(), &1.into()));
    let regions = handover["regions"].as_array().unwrap().clone();
    Handed { stream, uffd, image, regions }
}

/// Serves pages until the VMM has gone; how many.
fn serve(listener: &UnixListener) -> usize {
    let mut handed = take_over(listener);
    handed.stream.write_all(b"ready\n").unwrap();
    handed.stream.set_read_timeout(Some(Duration::from_millis(2))).unwrap();
    let mut served = 0;
    loop {
        for event in handed.uffd.events().unwrap() {
            let Event::Fault(address) = event else { continue };
            served += usize::from(handed.bring(address));
        }
        let mut gone = [0];
        if let Ok(0) = std::io::Read::read(&mut handed.stream, &mut gone) {
            return served;
        }
    }
}

impl Handed {
    fn bring(&self, address: u64) -> bool {
        let field = |region: &serde_json::Value, name: &str| region[name].as_u64().unwrap();
        let region = self.regions.iter().find(|region| {
            let start = field(region, "host_address");
            (start..start + field(region, "bytes")).contains(&address)
        });
        let region = region.unwrap();
        let offset = address - field(region, "host_address") + field(region, "file_offset");
        let mut page = [0; PAGE as usize];
        self.image.read_exact_at(&mut page, offset).unwrap();
        self.uffd.fill(address, &page).is_ok()
    }
}

fn listening(counter: &Counter) -> (String, UnixListener) {
    let path = counter.place.given_path("handler");
    let listener = UnixListener::bind(&path).unwrap();
    (path.to_str().unwrap().to_owned(), listener)
}

fn by_handler(counter: &Counter, socket: &str) -> Running {
    let options = ["--resume", "--memory-mode", "uffd", "--uffd-socket", socket];
    counter.restore("copy", &options)
}

#[test]
fn another_process_can_bring_memory_in() {
    if may_skip() {
        return;
    }
    let (counter, last) = saved();
    let (socket, listener) = listening(&counter);
    let handler: JoinHandle<usize> = thread::spawn(move || serve(&listener));
    let copy = by_handler(&counter, &socket);
    goes_on(&copy);
    let hot = counter.place.call(["snapshot", "hot", "--api-socket", "copy", "--json"]).end();
    let hot: serde_json::Value = serde_json::from_str(&hot.output(0)).unwrap();
    assert_goes_on(&counter, last, copy);
    let served = handler.join().unwrap() as u64;
    // The page map knows them, too.
    assert!((1..=served).contains(&hot["pages"].as_u64().unwrap()), "{hot} of {served}");
}

#[test]
fn handlers_that_are_none_are_refused_and_leave_nothing() {
    if may_skip() {
        return;
    }
    let (counter, _) = saved();
    let missing = counter.place.given_path("nobody");
    let missing = missing.to_str().unwrap();
    by_handler(&counter, missing).end().assert_refused(&["page fault handler", "nobody"]);
    for (answer, why) in [("no\n", "answers \"no\\n\""), ("", "answers \"\"")] {
        let (socket, listener) = listening(&counter);
        let handler = thread::spawn(move || {
            let mut handed = take_over(&listener);
            handed.stream.write_all(answer.as_bytes()).unwrap();
        });
        by_handler(&counter, &socket).end().assert_refused(&["page fault handler", why]);
        handler.join().unwrap();
        fs::remove_file(socket).unwrap();
    }
}

#[test]
fn a_vm_whose_handler_dies_ends_and_says_so() {
    if may_skip() {
        return;
    }
    let (counter, _) = saved();
    let (socket, listener) = listening(&counter);
    let handler = thread::spawn(move || {
        let mut handed = take_over(&listener);
        handed.stream.write_all(b"ready\n").unwrap();
        // It has seen a fault, and does not answer it.
        while handed.uffd.events().unwrap().is_empty() {
            thread::sleep(Duration::from_millis(1));
        }
    });
    let copy = by_handler(&counter, &socket);
    handler.join().unwrap();
    let ended = copy.end();
    assert_eq!(ended.code, MEMORY_LOST, "{ended:?}");
    assert!(ended.stderr.contains("the page fault handler has gone"), "{ended:?}");
}

#[test]
fn a_vm_whose_memory_file_is_cut_ends_and_says_so() {
    if may_skip() {
        return;
    }
    let (counter, _) = saved();
    let copy = counter.restore("copy", &["--memory-mode", "uffd"]);
    harness::eventually("it answers", || counter.ask(&["info", "copy"]).code == 0);
    File::options().write(true).open(counter.dir.join("memory")).unwrap().set_len(4096).unwrap();
    // The answer may get lost with the VM.
    counter.ask(&["resume", "copy"]);
    let ended = copy.end();
    assert_eq!(ended.code, MEMORY_LOST, "{ended:?}");
    assert!(ended.stderr.contains("the memory file has become shorter"), "{ended:?}");
}

#[test]
fn files_of_the_host_that_a_snapshot_names_need_consent() {
    if may_skip() {
        return;
    }
    let (counter, last) = saved_without_its_disk();
    let restore = |options: &[&str]| {
        let call = counter.place.call(["restore", counter.dir(), "--api-socket", "copy"]);
        call.arguments(options).start()
    };
    restore(&[]).end().assert_refused(&["\"data\" is", "given/disk", "--trust-paths"]);
    let other = counter.place.given("other", vec![7; 1 << 20]);
    let copy = restore(&["--resume", "--override", &format!("disk:data={other}")]);
    assert_goes_on(&counter, last, copy);
}

#[test]
fn disks_that_are_not_as_they_were_are_refused() {
    if may_skip() {
        return;
    }
    let (counter, _) = saved_without_its_disk();
    let disk = counter.place.given_path("disk");
    let refused = |options: &[&str], why: &[&str]| {
        counter.restore("copy", options).end().assert_refused(why);
    };
    File::options().write(true).open(&disk).unwrap().write_all(b"later").unwrap();
    refused(&[], &["\"data\"", "given/disk", "written to since"]);
    let smaller = counter.place.given("smaller", vec![7; 4096]);
    let smaller = format!("disk:data={smaller}");
    refused(&["--override", &smaller], &["\"data\"", "4096 bytes", "had 1048576"]);
    fs::remove_file(&disk).unwrap();
    refused(&[], &["\"data\"", "given/disk", "cannot be read"]);
    refused(&["--override", "disk:disk0=x"], &["no disk device called \"disk0\"", "data"]);
    refused(&["--override", "net:data=tap:x"], &["\"data\" is not a net device, but a disk"]);
}

#[test]
fn a_console_can_go_elsewhere() {
    if may_skip() {
        return;
    }
    let (counter, last) = saved();
    let copy = counter.restore("copy", &["--resume", "--override", "console=file:log"]);
    let log = counter.place.work().join("log");
    harness::eventually("it prints", || fs::read(&log).is_ok_and(|log| log.len() > 40));
    assert_eq!(counter.end("copy", copy), "");
    let printed = String::from_utf8(counter.place.take("log")).unwrap();
    follows(last, &printed);
}

/// There is no agent in this guest.
#[test]
fn a_vm_in_the_background_that_does_not_get_ready_is_gone() {
    if may_skip() {
        return;
    }
    let (counter, _) = saved();
    let ended = counter.restore("copy", &["--resume", "--wait-ready=1"]).end();
    assert_eq!(ended.code, NOT_READY, "{ended:?}");
    assert!(ended.stderr.contains("did not answer within 1 s"), "{ended:?}");
    assert!(ended.stderr.contains("vCPU 0 "), "{ended:?}");
    counter.place.assert_clean();
}

#[test]
fn a_vm_in_the_background_goes_with_its_caller() {
    if may_skip() {
        return;
    }
    let (counter, _) = saved();
    let calling = counter.restore("copy", &["--resume", "--wait-ready=3"]);
    goes_on(&calling);
    calling.signal(Signal::SIGTERM);
    calling.end();
    counter.place.assert_clean();
}

/// What goes on is the same machine but for its clock and its generation: letters follow.
#[test]
fn a_restored_guest_can_be_restored_in_its_turn_in_every_mode() {
    if may_skip() {
        return;
    }
    let (mut counter, _) = saved();
    for (round, mode) in ["uffd", "prefault", "uffd", "private"].into_iter().enumerate() {
        let copy = counter.restore("copy", &["--resume", "--memory-mode", mode]);
        goes_on(&copy);
        counter.dir = counter.place.given_path(&format!("round{round}"));
        counter.ask(&["snapshot", "copy", counter.dir(), "--keep-paused"]).output(0);
        let printed = counter.end("copy", copy);
        follows(before(&printed), &printed);
    }
}
