use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use super::all;

/// The stimuli of the list that concern the devices and transports of this crate.
const NUMBERS: &[u8] = &[
    1, 2, 4, 5, 6, 7, 9, 10, 11, 12, 14, 15, 20, 21, 22, 24, 26, 27, 30, 32, 33, 34, 35, 37, 39,
    40, 42, 43, 44, 45, 52, 53,
];

/// All the source of this crate.
fn source(folder: &Path, into: &mut String) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            source(&path, into);
        } else if path.extension().is_some_and(|kind| kind == "rs") {
            into.push_str(&fs::read_to_string(path).unwrap());
        }
    }
}

#[test]
fn a_hundred_and_more_are_our_own() {
    let own = all().iter().filter(|(number, _)| *number == "own").count();
    assert!(own >= 100, "{own}");
    assert!(all().len() >= 200, "{}", all().len());
}

#[test]
fn no_two_are_called_the_same() {
    let mut names = BTreeMap::new();
    for (_, name) in all() {
        *names.entry(name).or_insert(0) += 1;
    }
    // MMIO has a status of two bytes as well as PCI.
    names.retain(|_, count| *count > 1);
    assert_eq!(names, BTreeMap::from([("a status of two bytes", 2)]));
}

#[test]
fn every_number_of_the_list_has_a_stimulus_or_a_test() {
    let mut text = String::new();
    source(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut text);
    let rows: BTreeSet<&str> = all().into_iter().map(|(number, _)| number).collect();
    for number in NUMBERS {
        let (row, test) = (format!("H-{number:02}"), format!("\nfn h{number:02}_"));
        let test_inside = format!("    fn h{number:02}_");
        let there =
            rows.contains(row.as_str()) || text.contains(&test) || text.contains(&test_inside);
        assert!(there, "nothing for {row}");
    }
}
