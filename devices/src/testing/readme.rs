//! The tables of `README.md` are kept: each device names tests, and these exist.

use std::fs;
use std::path::Path;

const README: &str = include_str!("../../README.md");

/// Rows of the table under the heading `heading`, cell by cell, without its head.
fn table(heading: &str) -> Vec<Vec<&'static str>> {
    let (_, text) = README.split_once(heading).unwrap();
    let lines = text.lines().skip_while(|line| !line.starts_with('|'));
    let rows = lines.take_while(|line| line.starts_with('|')).skip(2);
    rows.map(|row| row.trim_matches('|').split('|').map(str::trim).collect()).collect()
}

/// What stands between backticks.
fn names(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

/// True if the file at `path`, of tests of guests, has one called `name` in its list.
fn has_trial(path: &Path, name: &str) -> bool {
    let text = fs::read_to_string(path).unwrap_or_default();
    let (head, listed) = (format!("fn {name}()"), format!("{name},"));
    let starts = |what: &str| text.lines().any(|line| line.trim_start().starts_with(what));
    let alone = format!("trials![{name}]");
    starts(&head) && (starts(&listed) || text.contains(&alone))
}

/// True if the file at `path` has a test called `name`.
fn has_test(path: &Path, name: &str) -> bool {
    let text = fs::read_to_string(path).unwrap_or_default();
    let head = format!("fn {name}(");
    let mut before = "";
    text.lines().any(|line| {
        let found = line.trim_start().starts_with(&head) && before.trim() == "#[test]";
        before = line;
        found
    })
}

fn check(heading: &str, folder: &str) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let folder = root.join(folder);
    let rows = table(heading);
    assert!(rows.len() >= 5, "{heading}: {} rows", rows.len());
    for row in rows {
        let (device, tests) = (row[0], names(row.last().unwrap()));
        assert!(!tests.is_empty(), "{device} names no test");
        for test in tests {
            let (file, name) = test.split_once("::").unwrap_or_else(|| panic!("{device}: {test}"));
            let exists = match file.starts_with("tests/") {
                true => has_trial(&root.join("../..").join(file), name),
                false => has_test(&folder.join(file), name),
            };
            assert!(exists, "{device}: there is no test {test}");
        }
        let source = names(device).last().copied().unwrap();
        let source = root.join(source);
        assert!(source.exists(), "{device}: there is no {}", source.display());
    }
}

#[test]
fn every_virtio_device_names_tests_that_exist() {
    check("### virtio\n", "virtio");
}

#[test]
fn every_legacy_device_names_tests_that_exist() {
    check("### Legacy\n", "legacy");
}

#[test]
fn every_transport_names_tests_that_exist() {
    check("### Transports\n", "");
}

#[test]
fn every_device_of_the_source_has_a_row() {
    let rows: String = table("### virtio\n").into_iter().map(|row| row[0].to_owned()).collect();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/virtio");
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let text = if path.is_file() { fs::read_to_string(&path).unwrap() } else { String::new() };
        let device = text.lines().any(|line| line.starts_with("impl VirtioDevice for"));
        assert!(!device || rows.contains(name), "{name} is a device without a row");
    }
}
