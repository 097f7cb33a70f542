//! Kernels of a few bytes, disk images and root images.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::artifacts::{repository, text};
use crate::place::Place;

/// Where the code of [`kernel`] is loaded and entered.
const LOAD_ADDRESS: u64 = 0x10_0000;
const ELF_HEADER: u64 = 64;
const PROGRAM_HEADER: u64 = 56;

/// An ELF file that is loaded like a kernel and is nothing but `code`, 64-bit, entered at its
/// first byte.
pub fn kernel(code: &[u8]) -> Vec<u8> {
    let code_at = ELF_HEADER + PROGRAM_HEADER;
    let len = code.len() as u64;
    // Class 64, little endian, version 1; then executable, x86-64, version 1.
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(16, 0);
    file.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    // Entry, program headers, no section headers, no flags.
    for value in [LOAD_ADDRESS, ELF_HEADER, 0] {
        file.extend(value.to_le_bytes());
    }
    file.extend([0; 4]);
    // Sizes: this header, one program header, no section header.
    for value in [ELF_HEADER as u16, PROGRAM_HEADER as u16, 1, 64, 0, 0] {
        file.extend(value.to_le_bytes());
    }
    // Loaded, readable and executable; offset, virtual and physical address, sizes, alignment.
    file.extend([1, 0, 0, 0, 5, 0, 0, 0]);
    for value in [code_at, LOAD_ADDRESS, LOAD_ADDRESS, len, len, 1] {
        file.extend(value.to_le_bytes());
    }
    file.extend(code);
    file
}

/// A kernel that only halts.
pub fn idle_kernel() -> Vec<u8> {
    // hlt; jmp hlt
    kernel(&[0xf4, 0xeb, 0xfd])
}

/// What a small picture starts with.
pub fn picture() -> Vec<u8> {
    let mut picture = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x10\0\0\0\x10\x08\x06\0\0\0".to_vec();
    picture.resize(4096, 0x5a);
    picture
}

/// Bytes that look like nothing, the same for the same seed.
pub fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len.next_multiple_of(8)];
    Noise::new(seed).fill(&mut bytes);
    bytes.truncate(len);
    bytes
}

/// The bytes of [`noise`], one piece after the other.
pub struct Noise(u64);

impl Noise {
    /// From the start.
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// The next bytes, a multiple of eight.
    pub fn fill(&mut self, piece: &mut [u8]) {
        for word in piece.chunks_exact_mut(8) {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            word.copy_from_slice(&self.0.to_le_bytes());
        }
    }
}

/// Runs a program of the host that makes something.
///
/// # Panics
/// If it fails, with what it said.
#[track_caller]
pub fn host(program: &str, arguments: &[&str]) {
    let mut command = Command::new(program);
    // mkfs and its like, for users whose PATH does not have them.
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let output = command.args(arguments).env("PATH", path).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}; run tests/packages"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {said}");
}

/// A static program of `tests/harness/<name>.c`, which runs in a guest too.
///
/// # Panics
/// If it cannot be compiled.
#[track_caller]
pub fn static_program(place: &Place, name: &str) -> Vec<u8> {
    let source = text(&repository().join(format!("tests/harness/{name}.c")));
    let program = text(&place.given_path(name));
    host("cc", &["-static", "-O1", "-s", "-Wall", "-Werror", "-o", &program, &source]);
    fs::read(program).unwrap()
}

/// A small Linux tree: busybox, some of its applets, and `/etc/image` with `mark` in it.
pub fn tree(place: &Place, mark: &str) -> String {
    let root = place.given_folder("tree");
    for folder in ["bin", "dev", "etc", "proc", "sys", "tmp", "run", "mnt", "root"] {
        fs::create_dir(Path::new(&root).join(folder)).unwrap();
    }
    let busybox = Path::new(&root).join("bin/busybox");
    fs::copy("/bin/busybox", busybox).expect("a static busybox; run tests/packages");
    for applet in ["sh", "cat", "echo", "mount", "ls", "rm", "sync", "grep", "true"] {
        std::os::unix::fs::symlink("busybox", Path::new(&root).join("bin").join(applet)).unwrap();
    }
    fs::write(Path::new(&root).join("etc/image"), mark).unwrap();
    root
}

/// An ext4 image of a tree.
pub fn ext4(place: &Place, tree: &str) -> String {
    let image = text(&place.given_path("root.ext4"));
    host("mkfs.ext4", &["-q", "-b", "4096", "-d", tree, &image, "16M"]);
    image
}

/// An erofs image of a tree.
pub fn erofs(place: &Place, tree: &str) -> String {
    let image = text(&place.given_path("root.erofs"));
    host("mkfs.erofs", &["--quiet", &image, tree]);
    image
}
