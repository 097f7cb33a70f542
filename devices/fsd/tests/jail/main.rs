//! The jail from within. The VMM's side starts this program in the place of `cube-fsd`; it enters the
//! jail as the server does, and then tries to get at what is outside.
//!
//! The walls (namespaces, root, capabilities) are tried without the filter of system calls, each for
//! itself. The filter is tried one call at a time: a call that it refuses is the end of the process.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panics")]

mod calls;
mod walls;

use std::io::Write;
use std::net::TcpListener;
use std::os::fd::FromRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;
use std::process::ExitCode;
use std::{env, fs};

use cube_fsd::jail;
use cube_fsd::service::Status;
use devices::executor::Executor;
use devices::virtio::fs::{Fs, FsConfig};
use libtest_mimic::{Arguments, Trial};
use tempfile::tempdir;

use self::walls::Outside;

/// What the inmate is to do, in the place of a tag.
const WALLS: &str = "walls";
const CALL: &str = "call:";

fn main() -> ExitCode {
    let words: Vec<String> = env::args().collect();
    if let Some(at) = words.iter().position(|word| word == "--vhost") {
        return inmate(&words, &words[at + 1]);
    }
    let trials = vec![
        trial("nothing_outside_can_be_reached_from_within", nothing_outside_can_be_reached),
        trial("what_is_not_needed_cannot_be_called", what_is_not_needed_cannot_be_called),
        trial("a_read_only_share_cannot_be_made_writable", read_only_stays_read_only),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn trial(name: &str, test: fn()) -> Trial {
    Trial::test(name, move || {
        test();
        Ok(())
    })
}

// --- within ------------------------------------------------------------------------------------

/// Goes where the server goes, in its order, and says what it has found in the place of a reason for
/// which it does not serve.
fn inmate(words: &[String], vhost: &str) -> ExitCode {
    let value = |name: &str| words.iter().skip_while(|word| *word != name).nth(1).unwrap();
    let (vhost, control) = (vhost.parse().unwrap(), value("--control").parse().unwrap());
    let (share, task) = (Path::new(value("--path")), value("--tag"));
    let outside = fs::read_to_string(share.join("outside"));
    jail::close_others(&mut [vhost, control]).unwrap();
    let read_only = words.iter().any(|word| word == "--read-only");
    let inside = jail::enter(share, read_only).unwrap();
    // SAFETY: a descriptor that this process was given for that, and that nobody else in it owns.
    let mut control = unsafe { UnixStream::from_raw_fd(control) };
    let found = match task.strip_prefix(CALL) {
        Some(name) => {
            jail::drop_privileges().unwrap();
            calls::make(name)
        }
        None => {
            jail::drop_capabilities().unwrap();
            let outside = serde_json::from_str(&outside.unwrap()).unwrap();
            serde_json::to_string(&walls::try_all(&outside, &inside)).unwrap()
        }
    };
    let status = Status { error: Some(found), ..Status::default() };
    control.write_all((serde_json::to_string(&status).unwrap() + "\n").as_bytes()).unwrap();
    ExitCode::FAILURE
}

// --- without -----------------------------------------------------------------------------------

/// Has this program started as the server of `share`; what it says, or how it has ended.
fn inmate_of(share: &Path, task: &str, read_only: bool) -> String {
    let config = FsConfig::new(env::current_exe().unwrap(), task, share.to_owned());
    let executor = Executor::spawn("test-jail").unwrap();
    let refused = Fs::new(executor.handle(), FsConfig { read_only, ..config });
    refused.err().expect("it does not serve").to_string()
}

/// What each of the walls' names has come to: 0 for what was reached, or an error's number.
fn tried(share: &Path, read_only: bool) -> Vec<(String, i32)> {
    let said = inmate_of(share, WALLS, read_only);
    let at = said.find('[').unwrap_or_else(|| panic!("{said}"));
    serde_json::from_str(&said[at..]).unwrap()
}

fn nothing_outside_can_be_reached() {
    let host = tempdir().unwrap();
    let (share, other) = (host.path().join("share"), host.path().join("other"));
    for folder in [&share, &other] {
        fs::create_dir(folder).unwrap();
        fs::write(folder.join("secret"), "secret").unwrap();
    }
    let network = TcpListener::bind("127.0.0.1:0").unwrap();
    let _socket = UnixListener::bind(other.join("socket")).unwrap();
    let name = format!("cube-jail-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let _abstract = UnixListener::bind_addr(&address).unwrap();
    let memory = walls::SharedMemory::new();
    let outside = Outside {
        other: other.clone(),
        port: network.local_addr().unwrap().port(),
        name,
        process: std::process::id(),
        memory: memory.key,
    };
    fs::write(share.join("outside"), serde_json::to_string(&outside).unwrap()).unwrap();
    symlink(other.join("secret"), share.join("link")).unwrap();
    fs::copy("/bin/true", share.join("program")).unwrap();
    fs::set_permissions(share.join("program"), fs::Permissions::from_mode(0o4755)).unwrap();
    walls::device_node(&share.join("null"));
    // All of it is there for who is not in the jail.
    let free = walls::try_outside(&outside);
    assert!(free.iter().all(|(_, errno)| *errno == 0), "{free:?}");
    let found = tried(&share, false);
    let expected: Vec<_> = walls::WALLS.iter().map(|wall| wall.0).collect();
    assert_eq!(found.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), expected);
    for ((name, errno), (_, _, refusals)) in found.iter().zip(walls::WALLS) {
        assert!(refusals.contains(errno), "{name}: error {errno}, and not one of {refusals:?}");
    }
}

fn read_only_stays_read_only() {
    let share = tempdir_with_outside();
    let found = tried(share.path(), true);
    let errno = |wanted: &str| found.iter().find(|(name, _)| name == wanted).unwrap().1;
    assert_eq!(errno("a new file"), libc::EROFS);
    assert_eq!(errno("a mount made writable"), libc::EPERM);
    let found = tried(tempdir_with_outside().path(), false);
    assert!(found.iter().any(|(name, errno)| name == "a new file" && *errno == 0), "{found:?}");
}

fn tempdir_with_outside() -> tempfile::TempDir {
    let share = tempdir().unwrap();
    let outside = serde_json::to_string(&Outside::default()).unwrap();
    fs::write(share.path().join("outside"), outside).unwrap();
    share
}

fn what_is_not_needed_cannot_be_called() {
    let share = tempdir().unwrap();
    let harmless = inmate_of(share.path(), &format!("{CALL}{}", calls::HARMLESS), false);
    assert!(harmless.contains("it has come back"), "{harmless}");
    for name in calls::REFUSED.iter().map(|call| call.0) {
        let ended = inmate_of(share.path(), &format!("{CALL}{name}"), false);
        assert!(ended.contains("SIGSYS"), "{name}: {ended}");
    }
}
