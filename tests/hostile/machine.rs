//! A real `cube-vmm` with every device, for one guest.

use std::fs;
use std::io::Write;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use harness::{Ended, Place};

use super::script::Script;

/// Guest memory.
pub const MEMORY: u64 = 64 << 20;

/// What the process may use beside guest memory.
const OWN: u64 = 64 << 20;

/// A guest that has not ended by then hangs; long, for those who ask for many random accesses.
const HANGS_AFTER: Duration = Duration::from_secs(1800);

/// Lines that it may write, whatever the guest does.
const LINES: usize = 150;

/// How devices are attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Mmio,
    Pci,
}

/// A device of the machine: its number on the bus, its type, its queues.
#[derive(Clone, Copy, Debug)]
pub struct Device {
    pub kind: Kind,
    pub index: u64,
    pub id: u64,
    pub queues: u64,
}

const BLOCK: u64 = 2;
const VSOCK: u64 = 19;
const RNG: u64 = 4;
const CONSOLE: u64 = 3;
const NET: u64 = 1;
const BALLOON: u64 = 5;
const PMEM: u64 = 27;

/// Type and number of queues, in the order in which the guest finds them.
const ALL: [(u64, u64); 7] =
    [(BLOCK, 1), (VSOCK, 3), (RNG, 1), (CONSOLE, 2), (NET, 3), (BALLOON, 5), (PMEM, 1)];

/// Says whether something may be missing, and tells so.
fn may_skip(word: &str, why: &str) -> bool {
    let allowed = std::env::var("CUBE_ALLOW_SKIP").unwrap_or_default();
    let skip = allowed.split([',', ' ']).any(|allowed| allowed == word);
    if skip {
        let test = thread::current().name().unwrap_or("test").to_owned();
        // To the stream itself: the test harness would swallow it from `eprintln`.
        let _ = writeln!(std::io::stderr(), "\x1b[1;31mSKIPPED {test}: {why}\x1b[0m");
    }
    skip
}

/// A network card needs root for its TAP.
fn has_net() -> bool {
    let root = nix::unistd::geteuid().is_root() && fs::metadata("/dev/net/tun").is_ok();
    root || !may_skip("net", "no network card without root and /dev/net/tun")
}

/// The devices, over MMIO or PCI.
pub fn devices(kind: Kind) -> Vec<Device> {
    let net = has_net();
    let present = ALL.into_iter().filter(|&(id, _)| net || id != NET);
    present.zip(0..).map(|((id, queues), index)| Device { kind, index, id, queues }).collect()
}

/// The one that is asked for something afterwards.
pub fn rng(kind: Kind) -> Device {
    devices(kind).into_iter().find(|device| device.id == RNG).unwrap()
}

/// Runs the guest to its end; `None` where there is no KVM and that may be.
pub fn run(kind: Kind, script: &Script) -> Option<Ended> {
    if let Err(error) = fs::File::open("/dev/kvm")
        && may_skip("kvm", &format!("/dev/kvm: {error}"))
    {
        return None;
    }
    static CARDS: AtomicU32 = AtomicU32::new(0);
    let place = Place::new();
    let kernel = place.given("guest", script.kernel());
    let disk = place.given("disk", vec![7; 1 << 20]);
    let pmem = place.given("pmem", vec![8; 1 << 20]);
    let (disk, pmem) = (format!("path={disk}"), format!("path={pmem},ro"));
    let card = CARDS.fetch_add(1, Ordering::Relaxed);
    let net = format!("tap=hg{}n{card}", std::process::id());
    let memory = format!("{}M", MEMORY >> 20);
    let mut call = place.call(["run", "--no-agent", "--kernel", &kernel, "--memory", &memory]);
    call = call.arguments(["--boot-protocol", "linux", "--console", "virtio"]);
    call = call.arguments(["--disk", &disk, "--pmem", &pmem]);
    if devices(kind).iter().any(|device| device.id == NET) {
        call = call.arguments(["--net", &net]);
    }
    if kind == Kind::Pci {
        call = call.arguments(["--transport", "pci"]);
    }
    let mut running = call.start();
    let status = format!("/proc/{}/status", running.pid());
    let mut most = 0;
    let deadline = Instant::now() + HANGS_AFTER;
    while !running.has_ended() {
        assert!(Instant::now() < deadline, "the guest hangs");
        most = most.max(high_water(&status));
        thread::sleep(Duration::from_millis(2));
    }
    let ended = running.end();
    assert!(most < MEMORY + OWN, "{} MiB of memory: {ended:?}", most >> 20);
    assert!(ended.stderr.lines().count() < LINES, "{ended:?}");
    assert!(!ended.stderr.contains("panicked at"), "{ended:?}");
    Some(ended)
}

/// The most memory that a process had so far, in bytes.
fn high_water(status: &str) -> u64 {
    let text = fs::read_to_string(status).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

/// Runs a guest that must find everything as it should, and powers off.
pub fn run_well(kind: Kind, script: &mut Script) {
    script.power_off();
    if let Some(ended) = run(kind, script) {
        assert!(ended.code == 0 && ended.stderr.contains("good"), "{kind:?}: {ended:?}");
    }
}
