//! A guest that writes to many pages, and what its snapshots are checked with.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use harness::{Ended, Place, Running, eventually, image};
use hypervisor::api::{MemoryMethod, SnapshotReport};

/// Counts, writes the count to one of 512 pages at 4 MiB and one of 512 at 4 GiB, and prints. Says '!'
/// for ever once register and memory differ.
#[rustfmt::skip]
const WRITE: &[u8] = &[
    0x31, 0xc9,                         // xor ecx,ecx
    0xbb, 0x00, 0x00, 0x20, 0x00,       // mov ebx,0x200000
    0x66, 0xba, 0xf8, 0x03,             // mov dx,0x3f8
    // The first four GiB are mapped one to one; a page directory more, at 3 MiB, for the next 2 MiB.
    0xbf, 0x00, 0x00, 0x30, 0x00,       // mov edi,0x300000
    0x48, 0xb8, 0x83, 0, 0, 0, 1, 0, 0, 0, // mov rax,0x100000083
    0x48, 0x89, 0x07,                   // mov QWORD PTR [rdi],rax
    0xbe, 0x20, 0xa0, 0x00, 0x00,       // mov esi,0xa020
    0x83, 0xcf, 0x03,                   // or edi,3
    0x48, 0x89, 0x3e,                   // mov QWORD PTR [rsi],rdi
    0x49, 0xb8, 0, 0, 0, 0, 1, 0, 0, 0, // mov r8,0x100000000
    // next:
    0x48, 0xff, 0xc1,                   // inc rcx
    0x48, 0xff, 0x03,                   // inc QWORD PTR [rbx]
    0x48, 0x3b, 0x0b,                   // cmp rcx,QWORD PTR [rbx]
    0x75, 0x2a,                         // jne bad
    0x48, 0x8d, 0x04, 0x89,             // lea rax,[rcx+rcx*4]
    0x25, 0xff, 0x01, 0x00, 0x00,       // and eax,0x1ff
    0xc1, 0xe0, 0x0c,                   // shl eax,12
    0x48, 0x89, 0x8c, 0x03, 0, 0, 0x20, 0, // mov QWORD PTR [rbx+rax+0x200000],rcx
    0x49, 0x89, 0x0c, 0x00,             // mov QWORD PTR [r8+rax],rcx
    0x89, 0xc8,                         // mov eax,ecx
    0x24, 0x0f,                         // and al,0xf
    0x04, b'a',                         // add al,'a'
    0xee,                               // out dx,al
    0xbe, 0xd0, 0x07, 0x00, 0x00,       // mov esi,2000
    // wait:
    0xff, 0xce,                         // dec esi
    0x75, 0xfc,                         // jne wait
    0xeb, 0xcb,                         // jmp next
    // bad:
    0xb0, b'!',                         // mov al,'!'
    0xee,                               // out dx,al
    0xeb, 0xfb,                         // jmp bad
];

/// 3 GiB below the gap, the rest above.
pub const MEMORY: &str = "3200M";

/// The page with the id of the machine's generation, which every copy has another of.
const GENERATION: u64 = 0xf_f000;

/// VMs in a place, each at a socket in its working folder.
pub struct Guests {
    pub place: Place,
}

impl Guests {
    pub fn new() -> Self {
        Self { place: Place::new() }
    }

    /// Starts the guest with further options; it writes when this returns.
    pub fn start(&self, options: &[&str]) -> Running {
        self.start_of(WRITE, MEMORY, options)
    }

    /// Starts another one, which prints the same.
    pub fn start_of(&self, code: &[u8], memory: &str, options: &[&str]) -> Running {
        let kernel = self.place.given("guest", image::kernel(code));
        let call = self.place.call(["start", "--api-socket", "api", "--memory", memory]);
        let call = call.arguments(["--kernel", &kernel, "--initrd", &kernel]);
        let call = call.arguments(["--boot-protocol", "linux", "--console", "serial"]);
        let call = call.arguments(["--boot-timeout", "1000000"]).arguments(options);
        let running = call.start();
        running.stderr.wait_for("abcdefghijklmnopabcdefghijklmnop");
        running
    }

    /// A subcommand about the VM at the socket that is named first.
    pub fn ask(&self, words: &[&str]) -> Ended {
        let (command, arguments) = words.split_first().unwrap();
        self.place.call([command, "--api-socket"]).arguments(arguments).end()
    }

    /// Where a snapshot of that name is.
    pub fn dir(&self, name: &str) -> PathBuf {
        self.place.given_path(name)
    }

    /// Takes a snapshot of the VM at `api` into `dir`.
    pub fn save(&self, api: &str, dir: &Path, options: &[&str]) -> SnapshotReport {
        let words = [&["snapshot", api, text(dir), "--json"], options].concat();
        serde_json::from_str(&self.ask(&words).output(0)).unwrap()
    }

    /// The same, as a difference that was found in this way.
    pub fn save_difference(&self, api: &str, dir: &Path, base: &Path, how: MemoryMethod) {
        let report = self.save(api, dir, &["--diff-of", text(base), "--keep-paused"]);
        assert_eq!(report.memory, how, "{report:?}");
    }

    /// `cube-vmm snapshot` about folders.
    pub fn snapshot(&self, words: &[&str]) -> Ended {
        self.place.call(["snapshot"]).arguments(words).end()
    }

    /// A VM of a snapshot, paused unless the options say otherwise, that answers at `api`.
    pub fn restore(&self, dir: &Path, api: &str, options: &[&str]) -> Running {
        let call = self.place.call(["restore", text(dir), "--api-socket", api]);
        let running = call.arguments(options).start();
        eventually("it answers", || self.ask(&["info", api]).code == 0);
        running
    }

    /// Ends a VM and gives what its guest has printed.
    pub fn end(&self, api: &str, running: Running) -> String {
        self.ask(&["stop", api, "--how", "kill"]).output(0);
        let ended = running.end();
        assert_eq!(ended.code, 0, "{ended:?}");
        ended.stderr
    }

    /// Kills a VM, and removes what that leaves behind.
    pub fn murder(&self, running: Running) {
        running.signal(nix::sys::signal::Signal::SIGKILL);
        running.end();
        for name in ["api", "api.vsock"] {
            std::fs::remove_file(self.place.path(name)).unwrap();
        }
    }
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The pages in which the memory of two whole snapshots differs, as far as either has data.
pub fn differing_pages(one: &Path, other: &Path) -> Vec<u64> {
    let [one, other] = [one, other].map(|dir| File::open(dir.join("memory")).unwrap());
    let len = one.metadata().unwrap().len();
    assert_eq!(len, other.metadata().unwrap().len());
    let mut differing = Vec::new();
    let (mut page, mut beside) = (vec![0; 4096], vec![0; 4096]);
    let (mut at, mut data) = (0, [0..0, 0..0]);
    while at < len {
        for (file, data) in [&one, &other].into_iter().zip(&mut data) {
            if data.end <= at {
                *data = next_data(file, at, len);
            }
        }
        if data.iter().all(|data| at < data.start) {
            at = data.iter().map(|data| data.start).min().unwrap();
            continue;
        }
        one.read_exact_at(&mut page, at).unwrap();
        other.read_exact_at(&mut beside, at).unwrap();
        if page != beside {
            differing.push(at);
        }
        at += 4096;
    }
    differing
}

fn next_data(file: &File, at: u64, len: u64) -> std::ops::Range<u64> {
    let extents = hypervisor::snapshot::extents::of(file, len).map(Result::unwrap);
    let mut later = extents.filter(|extent| extent.end > at);
    later.next().unwrap_or(len..u64::MAX)
}

/// That memory is the same in two snapshots but for the id of the generation.
#[track_caller]
pub fn assert_same_but_for_the_generation(one: &Path, other: &Path) {
    let differing = differing_pages(one, other);
    assert!(differing.iter().all(|&page| page == GENERATION), "{differing:x?}");
}
