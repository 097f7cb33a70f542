use super::*;

fn node(inner: u64) -> Node {
    Node::new(Place::Held(inner), libc::S_IFREG, Identity { ino: inner, btime: 0 })
}

/// A table with the root, and what is named in it, looked up once each.
fn table(names: &[(u64, &str)]) -> Table {
    let mut table = Table::default();
    table.begin(1, libc::S_IFDIR, Identity::default());
    for (inner, (parent, name)) in (10..).zip(names) {
        let id = table.add(node(inner));
        table.looked_up(id);
        table.name(*parent, name.as_bytes(), id);
    }
    table
}

#[test]
fn a_node_lives_through_lookups_handles_and_children() {
    let mut table = table(&[(ROOT, "a"), (2, "f")]);
    assert_eq!(table.forget(2, 1), [0; 0]);
    let handle = Handle { node: 3, inner: Some(7), directory: false, flags: 0 };
    let open = table.open(handle.clone());
    assert_eq!(table.forget(3, 1), [0; 0]);
    assert_eq!(table.path(3), "a/f");
    assert_eq!(table.close(open, 2), None);
    let (closed, mut released) = table.close(open, 3).unwrap();
    released.sort_unstable();
    assert_eq!((closed, released), (handle, vec![10, 11]));
    assert_eq!(table.nodes().count(), 1);
}

#[test]
fn the_root_is_never_forgotten() {
    let mut table = table(&[]);
    assert_eq!(table.forget(ROOT, u64::MAX), [0; 0]);
    assert!(table.node(ROOT).is_some());
}

#[test]
fn a_rename_takes_the_place_of_what_was_there() {
    let mut table = table(&[(ROOT, "a"), (ROOT, "b")]);
    table.rename((ROOT, b"a"), (ROOT, b"b"), false);
    assert_eq!((table.child(ROOT, b"a"), table.child(ROOT, b"b")), (None, Some(2)));
    assert!(table.node(3).unwrap().names.is_empty());
}

#[test]
fn an_exchange_swaps_two_names() {
    let mut table = table(&[(ROOT, "a"), (ROOT, "b")]);
    table.rename((ROOT, b"a"), (ROOT, b"b"), true);
    assert_eq!((table.child(ROOT, b"a"), table.child(ROOT, b"b")), (Some(3), Some(2)));
    assert_eq!(table.path(2), "b");
}

#[test]
fn a_rename_within_a_directory_that_is_forgotten_keeps_it() {
    let mut table = table(&[(ROOT, "d"), (2, "f")]);
    table.forget(2, 1);
    assert_eq!(table.rename((2, b"f"), (2, b"g"), false), [0; 0]);
    assert_eq!(table.path(3), "d/g");
}

#[test]
fn a_hard_link_keeps_its_other_name() {
    let mut table = table(&[(ROOT, "h1")]);
    table.name(ROOT, b"h2", 2);
    assert_eq!(table.rename((ROOT, b"h1"), (ROOT, b"h2"), false), [0; 0]);
    table.unname(ROOT, b"h1");
    assert_eq!((table.path(2), table.child(ROOT, b"h1")), ("h2".to_owned(), None));
}

#[test]
fn directories_that_the_host_has_turned_over_make_no_loop() {
    let mut table = table(&[(ROOT, "a"), (2, "b")]);
    for id in [2, 3] {
        table.node_mut(id).unwrap().kind = libc::S_IFDIR;
    }
    table.name(3, b"a", 2);
    assert_eq!((table.child(3, b"a"), table.child(2, b"b")), (Some(2), None));
    assert_eq!(table.child(ROOT, b"a"), None);
    table.name(ROOT, b"b", 3);
    assert_eq!(table.path(2), "b/a");
}

#[test]
fn numbers_are_not_used_again() {
    let mut table = table(&[(ROOT, "a")]);
    table.begin(1, libc::S_IFDIR, Identity::default());
    assert_eq!(table.add(node(20)), 3);
}
