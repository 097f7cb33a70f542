//! A guest that needs no Linux and counts: whatever is lost, or done twice, is a gap in the alphabet.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::thread;

use crate::{Ended, Place, Running, eventually, image};

/// Counts, prints, and says '!' for ever once register and memory differ.
#[rustfmt::skip]
pub const COUNT: &[u8] = &[
    0x31, 0xc9,                         // xor ecx,ecx
    0xbb, 0x00, 0x00, 0x20, 0x00,       // mov ebx,0x200000
    0x66, 0xba, 0xf8, 0x03,             // mov dx,0x3f8
    // next:
    0x48, 0xff, 0xc1,                   // inc rcx
    0x48, 0xff, 0x03,                   // inc QWORD PTR [rbx]
    0x48, 0x3b, 0x0b,                   // cmp rcx,QWORD PTR [rbx]
    0x75, 0x12,                         // jne bad
    0x89, 0xc8,                         // mov eax,ecx
    0x24, 0x0f,                         // and al,0xf
    0x04, b'a',                         // add al,'a'
    0xee,                               // out dx,al
    0xbe, 0xd0, 0x07, 0x00, 0x00,       // mov esi,2000
    // wait:
    0xff, 0xce,                         // dec esi
    0x75, 0xfc,                         // jne wait
    0xeb, 0xe3,                         // jmp next
    // bad:
    0xb0, b'!',                         // mov al,'!'
    0xee,                               // out dx,al
    0xeb, 0xfb,                         // jmp bad
];

/// Says whether there is no KVM and that may be.
pub fn may_skip() -> bool {
    let allowed = std::env::var("CUBE_ALLOW_SKIP").unwrap_or_default();
    let skip = allowed.split([',', ' ']).any(|word| word == "kvm");
    let skip = skip && File::open("/dev/kvm").is_err();
    if skip {
        let test = thread::current().name().unwrap_or("test").to_owned();
        // To the stream itself: the test harness would swallow it from `eprintln`.
        let _ = writeln!(std::io::stderr(), "\x1b[1;31mSKIPPED {test}: no /dev/kvm\x1b[0m");
    }
    skip
}

/// A place with a counting guest and the name of a snapshot.
pub struct Counter {
    /// The place.
    pub place: Place,
    /// The snapshot's folder.
    pub dir: PathBuf,
}

impl Default for Counter {
    fn default() -> Self {
        Self::new()
    }
}

impl Counter {
    /// A new one.
    pub fn new() -> Self {
        let place = Place::new();
        let dir = place.given_path("snapshot");
        Self { place, dir }
    }

    /// Starts the guest; it counts when this returns.
    pub fn start(&self, transport: &str) -> Running {
        let kernel = self.place.given("guest", image::kernel(COUNT));
        let disk = self.place.given("disk", vec![7; 1 << 20]);
        let disk = format!("path={disk},id=data");
        let call = self.place.call(["start", "--api-socket", "api", "--memory", "64M"]);
        let call = call.arguments(["--kernel", &kernel, "--initrd", &kernel, "--disk", &disk]);
        let call = call.arguments(["--boot-protocol", "linux", "--console", "serial"]);
        let call = call.arguments(["--transport", transport, "--boot-timeout", "1000000"]);
        let running = call.start();
        running.stderr.wait_for("abcdefghijklmnopabcdefghijklmnop");
        running
    }

    /// A subcommand about the VM at the socket that is named first.
    pub fn ask(&self, words: &[&str]) -> Ended {
        let (command, arguments) = words.split_first().unwrap();
        self.place.call([command, "--api-socket"]).arguments(arguments).end()
    }

    /// The snapshot's folder, as text.
    pub fn dir(&self) -> &str {
        self.dir.to_str().unwrap()
    }

    /// A VM of the snapshot, with the disk that it names.
    pub fn restore(&self, api: &str, options: &[&str]) -> Running {
        let call = self.place.call(["restore", self.dir(), "--trust-paths", "--api-socket", api]);
        call.arguments(options).start()
    }

    /// Ends a VM and gives what its guest has printed.
    pub fn end(&self, api: &str, running: Running) -> String {
        self.ask(&["stop", api, "--how", "kill"]).output(0);
        let ended = running.end();
        assert_eq!(ended.code, 0, "{ended:?}");
        ended.stderr
    }
}

/// What was printed is the alphabet, without a gap, from after `last` on; its last letter.
pub fn follows(last: char, printed: &str) -> char {
    let next = |letter: char| if letter == 'p' { 'a' } else { (letter as u8 + 1) as char };
    printed.chars().fold(last, |last, letter| {
        assert_eq!(letter, next(last), "after {last:?} in {printed:?}");
        letter
    })
}

/// Waits until the guest has printed more.
pub fn goes_on(running: &Running) {
    let before = running.stderr.so_far().len();
    eventually("the guest goes on", || running.stderr.so_far().len() > before + 40);
}

/// The letter that came before the first one.
pub fn before(printed: &str) -> char {
    match printed.chars().next().unwrap() {
        'a' => 'p',
        letter => (letter as u8 - 1) as char,
    }
}
