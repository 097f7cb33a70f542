//! A guest that does not keep to the rules: it gets errors, and nobody else notices.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use cube_fsd::share::{Policy, Settings};
use tempfile::{TempDir, tempdir};

use crate::guest::{Answers, BOTH, Guest, READ, ROOT, words};
use crate::local::{Local, mounted};

/// A share within a directory that must stay as it is.
pub struct Cage {
    outside: TempDir,
}

impl Cage {
    pub fn new() -> Self {
        let outside = tempdir().unwrap();
        fs::create_dir_all(outside.path().join("share/d")).unwrap();
        fs::write(outside.path().join("secret"), "secret").unwrap();
        fs::write(outside.path().join("share/f"), "f").unwrap();
        // Servers in this process leave no umask.
        let ours = fs::Permissions::from_mode(0o755);
        fs::set_permissions(outside.path().join("share"), ours).unwrap();
        Self { outside }
    }

    pub fn share(&self) -> std::path::PathBuf {
        self.outside.path().join("share")
    }

    /// Nothing outside has changed.
    pub fn holds(&self) {
        let names = fs::read_dir(self.outside.path()).unwrap();
        let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["secret", "share"]);
        assert_eq!(fs::read(self.outside.path().join("secret")).unwrap(), b"secret");
    }
}

/// R1, for any server.
pub fn names_that_lead_away(guest: &mut Guest<impl Answers>) {
    let d = guest.lookup(ROOT, "d").unwrap().node;
    let f = guest.lookup(ROOT, "f").unwrap().node;
    for name in ["", ".", "..", "/", "../secret", "/etc/hostname", "a/../../secret", "d/x"] {
        let refused = Err(libc::EINVAL);
        assert_eq!(guest.lookup(ROOT, name).map(|_| ()), refused, "LOOKUP {name:?}");
        assert_eq!(guest.unlink(ROOT, name), refused, "UNLINK {name:?}");
        assert_eq!(guest.rmdir(ROOT, name), refused, "RMDIR {name:?}");
        assert_eq!(guest.mkdir(ROOT, name).map(|_| ()), refused, "MKDIR {name:?}");
        let mode = libc::S_IFREG | 0o644;
        assert_eq!(guest.mknod(ROOT, name, mode, 0).map(|_| ()), refused, "MKNOD {name:?}");
        assert_eq!(guest.symlink(ROOT, name, "x").map(|_| ()), refused, "SYMLINK {name:?}");
        assert_eq!(guest.link(f, ROOT, name).map(|_| ()), refused, "LINK {name:?}");
        assert_eq!(guest.rename((ROOT, "f"), (d, name), 0), refused, "RENAME to {name:?}");
        assert_eq!(guest.rename((d, name), (ROOT, "g"), 0), refused, "RENAME from {name:?}");
        let swapped = guest.rename((ROOT, "f"), (d, name), libc::RENAME_EXCHANGE);
        assert_eq!(swapped, refused, "exchange with {name:?}");
        assert_eq!(guest.create(ROOT, name, BOTH).map(|_| ()), refused, "CREATE {name:?}");
    }
    let long = "x".repeat(256);
    assert_eq!(guest.mkdir(ROOT, long).map(|_| ()), Err(libc::ENAMETOOLONG));
    assert_eq!(guest.lookup(ROOT, "f").unwrap().node, f);
}

#[test]
fn r1_names_that_lead_away_are_refused_without_a_jail() {
    let cage = Cage::new();
    names_that_lead_away(&mut mounted(&cage.share()));
    cage.holds();
}

#[test]
fn r1_a_link_that_leads_away_is_not_followed() {
    let cage = Cage::new();
    let mut guest = mounted(&cage.share());
    let away = guest.symlink(ROOT, "away", "..").unwrap().node;
    let secret = guest.symlink(ROOT, "secret", "../secret").unwrap().node;
    assert_eq!(guest.lookup(away, "secret").map(|_| ()), Err(libc::ENOTDIR));
    assert!(guest.open(secret, READ).is_err());
    assert!(guest.open(away, READ).is_err());
    cage.holds();
}

/// R2, for any server.
pub fn messages_that_are_none(guest: &mut Guest<impl Answers>) {
    let mut lookup = guest.message(1, ROOT, b"f\0");
    let server = &mut guest.server;
    for len in 0..40 {
        assert_eq!(server.ask(&lookup[..len], 256), [0; 0], "a head of {len} bytes");
    }
    let refused = |reply: Vec<u8>, what: &str| {
        assert_eq!((reply.len(), &reply[4..8]), (16, &(-libc::EINVAL).to_le_bytes()[..]), "{what}");
    };
    refused(server.ask(&lookup[..41], 256), "a name that is cut off");
    for len in [0, 39, 43, 1 << 20, u32::MAX] {
        lookup[..4].copy_from_slice(&len.to_le_bytes());
        let reply = server.ask(&lookup, 256);
        assert_eq!(reply.len(), 16, "a length of {len}");
    }
    lookup[..4].copy_from_slice(&42_u32.to_le_bytes());
    for room in 0..16 {
        assert_eq!(server.ask(&lookup, room), [0; 0], "room for {room} bytes");
    }
    refused(server.ask(&lookup, 60), "no room for the entry");
    let nameless = guest.ask(1, ROOT, b"no end", 128);
    assert_eq!(nameless, Err(libc::EINVAL));
    for opcode in [0, 7, 19, 51, 52, 4096, u32::MAX] {
        assert!(guest.ask(opcode, ROOT, &[0; 64], 128).is_err(), "opcode {opcode}");
    }
    for node in [0, 99, u64::MAX] {
        assert_eq!(guest.getattr(node), Err(libc::ESTALE), "node {node}");
        assert_eq!(guest.lookup(node, "f").map(|_| ()), Err(libc::ESTALE));
        guest.forget(node, u64::MAX);
    }
    assert_eq!(guest.read(ROOT, 99, 0, 10), Err(libc::EBADF));
    assert_eq!(guest.release(ROOT, u64::MAX), Err(libc::EBADF));
    // READ without room for what it asks for, and with more than there can be.
    let read = words(&[0, 0, 0, 0, u32::MAX, 0, 0, 0, 0, 0]);
    assert!(guest.ask(15, ROOT, &read, 0).is_err());
    assert!(guest.ask(28, ROOT, &read, 64).is_err());
    assert!(guest.lookup(ROOT, "f").is_ok());
}

#[test]
fn r2_messages_that_are_none_get_an_error_and_the_next_one_its_answer() {
    let cage = Cage::new();
    messages_that_are_none(&mut mounted(&cage.share()));
    cage.holds();
}

#[test]
fn r3_handles_belong_to_their_node_and_their_kind() {
    let cage = Cage::new();
    let mut guest = mounted(&cage.share());
    let (f, d) = (guest.walk("f").unwrap().node, guest.walk("d").unwrap().node);
    let (file, directory) = (guest.open(f, BOTH).unwrap(), guest.opendir(d).unwrap());
    assert_eq!(guest.read(d, file, 0, 1), Err(libc::EBADF));
    assert_eq!(guest.releasedir(f, file), Err(libc::EBADF));
    assert_eq!(guest.release(d, directory), Err(libc::EBADF));
    assert_eq!(guest.open(d, READ), Err(libc::EISDIR));
    assert_eq!(guest.opendir(f), Err(libc::ENOTDIR));
    // Behind the last byte that a file can have.
    for at in [i64::MAX as u64 - 1, i64::MAX as u64, 1 << 63, u64::MAX - 5, u64::MAX] {
        assert_eq!(guest.read(f, file, at, 4096), Err(libc::EINVAL), "{at}");
        assert_eq!(guest.write(f, file, at, b"x"), Err(libc::EINVAL), "{at}");
    }
    guest.release(f, file).unwrap();
    assert_eq!(guest.release(f, file), Err(libc::EBADF));
}

#[test]
fn r4_no_device_nodes_are_made() {
    let cage = Cage::new();
    let mut guest = mounted(&cage.share());
    for (kind, rdev) in [(libc::S_IFBLK, 0x800), (libc::S_IFCHR, 0x103), (libc::S_IFBLK, 0)] {
        assert_eq!(guest.mknod(ROOT, "dev", kind | 0o666, rdev).map(|_| ()), Err(libc::EPERM));
    }
}

#[test]
fn r5_rights_are_those_of_who_asks() {
    let cage = Cage::new();
    let mut guest = mounted(&cage.share());
    guest.uid = 12_345;
    guest.gid = 12_345;
    assert_eq!(guest.mkdir(ROOT, "theirs").map(|_| ()), Err(libc::EACCES));
    guest.uid = 0;
    let d = guest.mkdir(ROOT, "ours").unwrap();
    assert_eq!(d.attr.uid, 0);
}

/// Numbers at which something ends.
const EDGES: [u64; 8] =
    [0, 1 << 31, u32::MAX as u64, 1 << 32, i64::MAX as u64 - 1, i64::MAX as u64, 1 << 63, u64::MAX];

/// The body of a message: numbers, most of them of nodes and handles that there are or at which something
/// ends, or bytes; a name behind them.
fn body(random: &mut impl FnMut() -> u32) -> Vec<u8> {
    if random().is_multiple_of(4) {
        let len = random() % 96;
        return (0..len).map(|_| (random() >> (random() % 8)) as u8).collect();
    }
    let mut bytes = Vec::new();
    for _ in 0..random() % 12 {
        let number = match random() % 8 {
            0..4 => u64::from(random() % 24),
            4..6 => EDGES[random() as usize % EDGES.len()],
            6 => u64::from(random()) << 32 | u64::from(random()),
            _ => u64::from(random() % 24) << 32 | u64::from(random() % 24),
        };
        bytes.extend(number.to_le_bytes());
    }
    let names = [&b"f\0"[..], b"d\0", b"n\0", b"f\0n\0", b"n\0f\0", b".\0", b"", b"no end"];
    bytes.extend(names[random() as usize % names.len()]);
    bytes
}

/// Messages of all kinds, few of which make sense.
pub fn noise(guest: &mut Guest<impl Answers>, rounds: u32, mut seed: u64) {
    let mut random = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed as u32
    };
    for _ in 0..rounds {
        let (opcode, node) = (random() % 54, u64::from(random() % 12));
        // What ends the mount, or begins another one, is not noise.
        if matches!(opcode, 26 | 38) {
            continue;
        }
        let body = body(&mut random);
        let mut message = guest.message(opcode, node, &body);
        if random() % 8 == 0 {
            let at = random() as usize % message.len();
            message[at] = random() as u8;
        }
        if message[4..8] == 26_u32.to_le_bytes() || message[4..8] == 38_u32.to_le_bytes() {
            continue;
        }
        let reply = guest.server.ask(&message, random() as usize % 512);
        assert!(reply.len() < 512);
    }
}

#[test]
fn fuzz_messages_of_any_kind_are_survived() {
    let rounds = std::env::var("CUBE_FUZZ").ok().and_then(|text| text.parse().ok());
    let cage = Cage::new();
    let mut guest = mounted(&cage.share());
    noise(&mut guest, rounds.unwrap_or(20_000), 0x2545_f491_4f6c_dd1d);
    guest.mount();
    assert!(guest.lookup(ROOT, "d").is_ok());
    cage.holds();
}

#[test]
fn q4_a_state_that_was_forged_changes_nothing() {
    let cage = Cage::new();
    let path = cage.share();
    let mut guest = mounted(&path);
    let f = guest.lookup(ROOT, "f").unwrap().node;
    guest.open(f, BOTH).unwrap();
    let state = cube_fsd::state::State::parse(&guest.server.save()).unwrap();
    let forged = |change: &dyn Fn(&mut cube_fsd::state::Mount)| {
        let mut state = state.clone();
        change(state.mount.as_mut().unwrap());
        refused(&path, &state.to_bytes().unwrap())
    };
    let cut = forged(&|mount| mount.handles[0].flags |= libc::O_TRUNC as u32);
    assert!(cut.contains("not allowed"), "{cut}");
    let away = forged(&|mount| mount.nodes[1].names[0].1 = b"../secret"[..].into());
    assert!(away.contains("no single component"), "{away}");
    assert_eq!(fs::read(path.join("f")).unwrap(), b"f");
    cage.holds();
}

fn refused(path: &Path, state: &[u8]) -> String {
    let mut server = Local::new(path, Settings::default(), Policy::Tolerant);
    server.load(state).unwrap_err().to_string()
}
