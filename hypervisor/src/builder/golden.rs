//! Snapshots that earlier releases have written must load for ever, and what becomes of them when
//! somebody changes a few bytes must be refused, soon. All that needs no KVM is done: descriptions
//! and states are read, the machine is made, and its devices take their records.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use devices::testing::fuzz;

use super::*;
use crate::snapshot::checksum;
use crate::snapshot::manifest::Manifest;

/// Each description with a state; a version of either that was ever written stays here.
const GOLDEN: [(&str, &str); 3] = [
    ("manifest-1-mmio.json", "state-1-mmio"),
    ("manifest-1-pci.json", "state-1-pci"),
    ("manifest-2-pci.json", "state-2-pci"),
];

/// The same of machines whose devices need more than files; they are made in `tests/snapshot`.
const WITH_ALL_DEVICES: [(&str, &str); 2] =
    [("manifest-3-mmio.json", "state-3-mmio"), ("manifest-3-pci.json", "state-3-pci")];

fn read(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A folder with files for the devices of a machine.
struct Ground {
    folder: tempfile::TempDir,
    memory: Memory,
}

impl Ground {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self { folder, memory: memory::fresh(64 << 20).unwrap() }
    }

    fn file(&self, name: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        let file = std::fs::File::options().create(true).truncate(false).write(true).open(&path);
        file.unwrap().set_len(2 << 20).unwrap();
        path
    }

    /// Makes the machine of a configuration and gives its devices their records.
    fn apply(&self, config: &VmConfig, state: MachineState) -> Result<(), BuildError> {
        let mut config = config.clone();
        config.disks.iter_mut().for_each(|disk| disk.path = self.file(&disk.id));
        config.pmem.iter_mut().for_each(|pmem| pmem.path = self.file(&pmem.id));
        config.vsock = None;
        let (events, _receiver) = Events::channel();
        let console = ConsoleSink::default();
        let observers = Observers { ladder: Ladder::start(), stamp_entry: false, events, console };
        let files = Files::open(&config, false)?;
        let pmem = place_pmem(&config, files.pmem);
        let devices = DeviceFiles { disks: files.disks, net: files.net, pmem };
        let (_, records) = state.divide();
        let memory = (&self.memory, Some(records));
        Parts::make(&config, files.boot, devices, memory, &observers).map(drop)
    }
}

#[test]
fn what_earlier_releases_have_written_is_understood() {
    let ground = Ground::new();
    let parsed = |(manifest, state): (&str, &str)| {
        let manifest = Manifest::parse(&read(manifest)).unwrap();
        let state = read(state);
        assert_eq!(manifest.state_crc64, checksum::of(&state));
        let state = MachineState::parse(&state).unwrap();
        assert_eq!(state.vcpus.len(), manifest.config.cpus as usize);
        assert!(!state.devices.is_empty());
        (manifest, state)
    };
    for (manifest, state) in GOLDEN.map(parsed) {
        ground.apply(&manifest.config, state).unwrap();
    }
    for (manifest, state) in WITH_ALL_DEVICES.map(parsed) {
        assert!(manifest.config.net.iter().all(|card| state.devices.contains_key(&card.id)));
        assert!(manifest.config.fs.iter().all(|share| state.devices.contains_key(&share.id)));
    }
}

/// `bytes` with a few changes, of which `script` has eight bytes each: where, how, and what.
fn changed(bytes: &[u8], script: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for edit in script.chunks_exact(8).take(4) {
        let word = |at: usize| usize::from(u16::from_le_bytes([edit[at], edit[at + 1]]));
        let at = (word(0) | word(2) << 16) % bytes.len().max(1);
        match edit[4] % 8 {
            0 | 1 => bytes[at] ^= 1 << (edit[5] % 8),
            2 => bytes[at] = edit[6],
            // The head of an item that is long, or that claims to be.
            3 => {
                bytes[at] =
                    [0x1b, 0x3b, 0x5b, 0x7b, 0x9b, 0xbb, 0xdb, 0xfb][usize::from(edit[5] % 8)]
            }
            4 => bytes.truncate(at + 1),
            5 => drop(bytes.remove(at)),
            6 => bytes.insert(at, edit[6]),
            _ => {
                let from = word(6) % bytes.len();
                let to = (from + 64).min(bytes.len());
                let piece = bytes[from..to].to_vec();
                bytes.splice(at..at, piece);
            }
        }
        if bytes.is_empty() {
            break;
        }
    }
    bytes
}

/// What came of it, for the loop to find what is new; that nothing hangs is told here.
fn soon<T>(what: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    let start = Instant::now();
    let outcome = what();
    assert!(start.elapsed() < Duration::from_secs(20), "it hangs");
    // Numbers and names are as many as there are inputs.
    outcome.map_err(|error| error.split([':', '"', '0']).next().unwrap_or_default().to_owned())
}

const SCRIPTS: [&[u8]; 3] = [
    &[0x10, 0, 0, 0, 2, 0, 0xff, 0],
    &[0x80, 1, 0, 0, 3, 4, 0, 0, 0x40, 0, 0, 0, 7, 0, 9, 9],
    &[0x20, 0x30, 0, 0, 0, 3, 0, 0],
];

fn scripts() -> Vec<Vec<u8>> {
    SCRIPTS.iter().map(|script| script.to_vec()).collect()
}

/// Most KiB by which the process may grow, whatever a snapshot claims.
const GROWTH: u64 = 64 << 10;

/// KiB of memory that the process has had at most.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Set in the process that a test has to itself.
const ALONE: &str = "CUBE_TEST_ALONE";

/// Runs the part of a test that must not let its process grow in one that no other test takes memory
/// in.
fn without_growing(test: &str, run: impl FnOnce()) {
    if std::env::var_os(ALONE).is_some() {
        let before = peak();
        run();
        assert!(peak() - before < GROWTH, "it grew from {before} to {} KiB", peak());
        return;
    }
    let mut again = std::process::Command::new(std::env::current_exe().unwrap());
    again.args(["--exact", &format!("builder::golden::{test}"), "--nocapture"]).env(ALONE, "1");
    let ended = again.output().unwrap();
    let [said, told] = [&ended.stdout, &ended.stderr].map(|text| String::from_utf8_lossy(text));
    println!("{said}");
    assert!(ended.status.success() && said.contains("1 passed"), "{said}{told}");
}

#[test]
fn fuzz_states_with_changes() {
    without_growing("fuzz_states_with_changes", states_with_changes);
}

fn states_with_changes() {
    let ground = Ground::new();
    let golden = GOLDEN
        .map(|(manifest, state)| (Manifest::parse(&read(manifest)).unwrap().config, read(state)));
    let mut turn = 0;
    fuzz("snapshot states", &scripts(), |script| {
        turn += 1;
        let (config, state) = &golden[turn % golden.len()];
        let bytes = changed(state, script);
        soon(|| {
            let state = MachineState::parse(&bytes).map_err(|error| error.to_string())?;
            ground.apply(config, state).map_err(|error| error.to_string())
        })
    });
}

#[test]
fn fuzz_descriptions_with_changes() {
    without_growing("fuzz_descriptions_with_changes", descriptions_with_changes);
}

fn descriptions_with_changes() {
    let golden = GOLDEN.into_iter().chain(WITH_ALL_DEVICES);
    let golden: Vec<_> = golden.map(|(manifest, _)| read(manifest)).collect();
    let mut turn = 0;
    fuzz("snapshot descriptions", &scripts(), |script| {
        turn += 1;
        let mut bytes = changed(&golden[turn % golden.len()], script);
        // Half of them with the right checksum, so that more than that is looked at.
        let digits = bytes.len().saturating_sub(20)..bytes.len().saturating_sub(4);
        if turn % 4 < 2 && bytes.len() > 20 {
            let blank = [&bytes[..digits.start], &bytes[digits.end..]].concat();
            let sum = checksum::of(&blank);
            bytes[digits].copy_from_slice(sum.as_bytes());
        }
        soon(|| Manifest::parse(&bytes).map(|_| ()).map_err(|error| error.to_string()))
    });
}
