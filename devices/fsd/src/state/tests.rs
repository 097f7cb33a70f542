use super::*;
use crate::state::gate::GateError;
use crate::table::ROOT;

/// A mount with a directory, a file in it, and a handle on that.
pub(crate) fn example() -> State {
    let node = |id, kind, names: &[(u64, &[u8])]| SavedNode {
        id,
        lookups: 1,
        kind,
        ino: 100 + id,
        btime: 7,
        tombstone: false,
        names: names.iter().map(|(parent, name)| (*parent, (*name).into())).collect(),
    };
    let mut request = vec![0; 104];
    request[4] = crate::service::INIT as u8;
    let mount = Mount {
        request,
        reply: vec![0; 80],
        next_node: 4,
        next_handle: 1,
        nodes: vec![
            node(ROOT, libc::S_IFDIR, &[]),
            node(2, libc::S_IFDIR, &[(ROOT, b"d")]),
            node(3, libc::S_IFREG, &[(2, b"f"), (ROOT, b"\xff link")]),
        ],
        handles: vec![SavedHandle { id: 0, node: 3, directory: false, flags: 2 }],
        orphans: Vec::new(),
    };
    let share = ShareIdentity { tag: "t".into(), path: "/x".into(), ino: 101, btime: 7, fsid: 9 };
    State { share, settings: Settings::default(), mount: Some(mount) }
}

fn refusal(change: impl FnOnce(&mut Mount)) -> GateError {
    let mut state = example();
    change(state.mount.as_mut().unwrap());
    match State::parse(&state.to_bytes().unwrap()) {
        Err(StateError::Gate(error)) => error,
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn a_state_comes_back_equal() {
    let state = example();
    assert_eq!(State::parse(&state.to_bytes().unwrap()).unwrap(), state);
}

#[test]
fn the_first_version_is_read_and_saved_as_this_one() {
    let State { share, settings, mount } = example();
    let Settings { read_only, cache, writeback, xattr, acl, .. } = settings;
    let settings = SettingsV1 { read_only, cache, writeback, xattr, acl };
    let old = postcard::to_allocvec(&StateV1 { share, settings, mount }).unwrap();
    let state = State::parse(&sealed(FIRST, &old)).unwrap();
    assert_eq!(state, example());
    assert!(State::parse(&sealed(VERSION, &old)).is_err());
}

#[test]
fn q1_every_truncation_is_refused() {
    let bytes = example().to_bytes().unwrap();
    for len in 0..bytes.len() {
        assert!(State::parse(&bytes[..len]).is_err(), "{len} bytes");
    }
}

#[test]
fn q1_every_flipped_bit_is_refused() {
    let bytes = example().to_bytes().unwrap();
    for bit in 0..bytes.len() * 8 {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(State::parse(&damaged).is_err(), "bit {bit}");
    }
}

/// A payload with a head and a checksum that fit.
fn sealed(version: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&version.to_le_bytes());
    bytes.extend_from_slice(&(payload.len() as u64).to_le_bytes());
    bytes.extend_from_slice(payload);
    let sum = Sha256::digest(&bytes);
    bytes.extend_from_slice(&sum);
    bytes
}

#[test]
fn q2_other_formats_versions_and_lengths_are_told_apart() {
    let payload = postcard::to_allocvec(&example()).unwrap();
    assert!(State::parse(&sealed(VERSION, &payload)).is_ok());
    assert!(matches!(State::parse(&sealed(3, &payload)), Err(StateError::Version(3))));
    let mut other = sealed(VERSION, &payload);
    other[0] ^= 1;
    assert!(matches!(State::parse(&other), Err(StateError::Magic)));
    let trailing = [&payload[..], &[0]].concat();
    let refused = State::parse(&sealed(VERSION, &trailing));
    assert!(matches!(refused, Err(StateError::Gate(GateError::Trailing(1)))), "{refused:?}");
    let mut longer = sealed(VERSION, &payload);
    longer.push(0);
    assert!(matches!(State::parse(&longer), Err(StateError::Length { .. })));
    let mut damaged = sealed(VERSION, &payload);
    *damaged.last_mut().unwrap() ^= 1;
    assert!(matches!(State::parse(&damaged), Err(StateError::Damaged)));
}

#[test]
fn q2_counts_that_cannot_be_take_no_memory() {
    // A tag of 2^60 bytes, and a payload of lengths alone.
    let huge = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x0f];
    for payload in [&huge[..], &[0xff; 4096]] {
        assert!(matches!(State::parse(&sealed(VERSION, payload)), Err(StateError::Form(_))));
    }
}

#[test]
fn q3_names_that_leave_their_directory_are_refused() {
    for name in [&b".."[..], b"../../etc/hostname", b"/etc/hostname", b"", b".", b"a/b", b"a\0b"] {
        let error = refusal(|mount| mount.nodes[1].names[0].1 = name.into());
        assert!(matches!(error, GateError::Name { id: 2, .. }), "{error}");
    }
}

#[test]
fn q3_a_tree_that_cannot_be_is_refused() {
    let error = refusal(|mount| drop(mount.nodes.remove(0)));
    assert_eq!(error, GateError::NoRoot);
    let error = refusal(|mount| mount.nodes.clear());
    assert_eq!(error, GateError::NoRoot);
    let error = refusal(|mount| mount.nodes[0].names.push((2, b"x"[..].into())));
    assert!(matches!(error, GateError::Root(_)));
    let error = refusal(|mount| mount.nodes[0].tombstone = true);
    assert!(matches!(error, GateError::Root(_)));
    let error = refusal(|mount| mount.nodes[0].lookups = 0);
    assert!(matches!(error, GateError::Root(_)));
    let error = refusal(|mount| mount.nodes[2].id = 2);
    assert_eq!(error, GateError::NodeOrder(2));
    let error = refusal(|mount| mount.nodes[1].names[0].0 = 2);
    assert!(matches!(error, GateError::Loop(_)), "its own parent: {error}");
    let error = refusal(|mount| {
        mount.nodes[2].kind = libc::S_IFDIR;
        mount.nodes[2].names.pop();
        mount.nodes[1].names[0].0 = 3;
        mount.handles[0].directory = true;
    });
    assert!(matches!(error, GateError::Loop(_)), "a loop of two: {error}");
    let error = refusal(|mount| mount.nodes[1].names[0].0 = 9);
    assert_eq!(error, GateError::Parent { id: 2, parent: 9 });
    let error = refusal(|mount| mount.nodes[2].names[0].0 = 3);
    assert_eq!(error, GateError::Parent { id: 3, parent: 3 });
    let error = refusal(|mount| mount.nodes[2].names[1] = (ROOT, b"d"[..].into()));
    assert!(matches!(error, GateError::SameName { parent: ROOT, .. }));
    let error = refusal(|mount| mount.nodes[1].names.push((ROOT, b"e"[..].into())));
    assert_eq!(error, GateError::DirectoryNames(2));
    let error = refusal(|mount| mount.nodes[2].kind = libc::S_IFREG | 1);
    assert!(matches!(error, GateError::Kind { id: 3, .. }));
}

#[test]
fn q3_numbers_that_cannot_be_are_refused() {
    let error = refusal(|mount| mount.next_node = 3);
    assert_eq!(error, GateError::NodeNumber { id: 3, next: 3 });
    let error = refusal(|mount| mount.nodes[2].lookups = 1 << 56);
    assert!(matches!(error, GateError::Lookups { id: 3, .. }));
    let error = refusal(|mount| {
        mount.nodes[2].lookups = 0;
        mount.handles.clear();
    });
    assert_eq!(error, GateError::Unneeded(3));
    let error = refusal(|mount| mount.request[4] = 1);
    assert_eq!(error, GateError::Init);
    let error = refusal(|mount| mount.reply.clear());
    assert_eq!(error, GateError::Init);
}

#[test]
fn q3_handles_that_could_change_something_are_refused() {
    let error = refusal(|mount| mount.handles[0].node = 9);
    assert_eq!(error, GateError::HandleNode { id: 0, node: 9 });
    let error = refusal(|mount| mount.handles[0].node = 2);
    assert_eq!(error, GateError::HandleNode { id: 0, node: 2 });
    let error = refusal(|mount| mount.next_handle = 0);
    assert_eq!(error, GateError::HandleNumber { id: 0, next: 0 });
    let error = refusal(|mount| mount.handles.push(mount.handles[0].clone()));
    assert_eq!(error, GateError::HandleOrder(0));
    let bad = [
        libc::O_TRUNC,
        libc::O_CREAT,
        libc::O_EXCL,
        libc::O_APPEND,
        libc::O_PATH,
        libc::O_TMPFILE,
        1 << 30,
    ];
    for flags in bad {
        let error = refusal(|mount| mount.handles[0].flags = flags as u32);
        assert!(matches!(error, GateError::Flags { .. }), "{flags:#o}: {error}");
    }
    let mut state = example();
    state.settings.read_only = true;
    let refused = State::parse(&state.to_bytes().unwrap());
    assert!(matches!(refused, Err(StateError::Gate(GateError::ReadOnly(0)))));
}

#[test]
fn q3_orphans_with_impossible_content_are_refused() {
    let orphan = |data: Vec<(u64, Vec<u8>)>, size| {
        refusal(move |mount| {
            mount.nodes[2].names.clear();
            mount.orphans.push(Orphan { node: 3, size, data, ..Orphan::default() });
        })
    };
    assert_eq!(orphan(vec![(0, vec![1; 4])], 3), GateError::OrphanData(3));
    assert_eq!(orphan(vec![(0, vec![1; 4]), (2, vec![1])], 9), GateError::OrphanData(3));
    assert_eq!(orphan(vec![(u64::MAX, vec![1])], u64::MAX), GateError::OrphanData(3));
    assert_eq!(orphan(vec![], u64::MAX), GateError::OrphanData(3));
    let named = refusal(|mount| mount.orphans.push(Orphan { node: 3, ..Orphan::default() }));
    assert_eq!(named, GateError::Orphan(3));
}

#[test]
fn a_chain_of_directories_may_be_deep_and_not_endless() {
    let chain = |depth: u64| {
        let mut state = example();
        let mount = state.mount.as_mut().unwrap();
        let node = mount.nodes[1].clone();
        mount.handles.clear();
        mount.nodes.truncate(1);
        // Each in the next one, so that no order of numbers helps.
        for id in 2..depth + 2 {
            let parent = if id == depth + 1 { ROOT } else { id + 1 };
            let names = vec![(parent, b"d"[..].into())];
            mount.nodes.push(SavedNode { id, names, ..node.clone() });
        }
        mount.next_node = depth + 2;
        State::parse(&state.to_bytes().unwrap())
    };
    assert!(chain(60_000).is_ok());
    assert!(matches!(chain(70_000), Err(StateError::Gate(GateError::Loop(_)))));
}

#[test]
fn fuzz_states_of_any_kind_neither_panic_nor_pass_what_cannot_be() {
    let rounds = std::env::var("CUBE_FUZZ").ok().and_then(|text| text.parse().ok());
    let payload = postcard::to_allocvec(&example()).unwrap();
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed % below as u64) as usize
    };
    let mut passed = 0;
    for _ in 0..rounds.unwrap_or(20_000_u64) {
        let mut mutated = payload.clone();
        for _ in 0..=random(4) {
            let at = random(mutated.len());
            mutated[at] = random(256) as u8;
        }
        if let Ok(state) = State::parse(&sealed(VERSION, &mutated)) {
            let names =
                state.mount.iter().flat_map(|mount| &mount.nodes).flat_map(|node| &node.names);
            assert!(names.into_iter().all(|(_, name)| crate::names::is_legal(name)));
            passed += 1;
        }
    }
    assert!(passed > 0, "every mutation is refused: nothing was tried");
}
