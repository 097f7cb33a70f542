//! Swap space of a test's own, and memory of processes that goes there.

use std::fs;
use std::io;
use std::process::Command;

use crate::image::host;
use crate::place::Place;

/// Swap that the host has as long as this lives. It is of all processes of the host.
pub struct Swap {
    device: String,
}

impl Swap {
    /// Adds so many bytes, on a loop device, since not every file system takes swap.
    ///
    /// # Panics
    /// If it may not, which root may.
    pub fn add(place: &Place, bytes: usize) -> Self {
        let file = place.given("swap", vec![0; bytes]);
        let made = Command::new("losetup").args(["--find", "--show", &file]).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let this = Self { device: String::from_utf8(made.stdout).unwrap().trim().to_owned() };
        host("mkswap", &[&this.device]);
        host("swapon", &[&this.device]);
        this
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        // What a test that has failed left in it comes back to memory.
        for (program, option) in [("swapoff", None), ("losetup", Some("-d"))] {
            let done = Command::new(program).args(option).arg(&self.device).output();
            if !done.as_ref().is_ok_and(|output| output.status.success()) {
                eprintln!("{program} {}: {done:?}", self.device);
            }
        }
    }
}

/// Bytes of a process that are in swap.
///
/// # Panics
/// If it has ended.
pub fn swapped(pid: u32) -> u64 {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let line = rollup.lines().find_map(|line| line.strip_prefix("Swap:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Sends the large writable mappings of a process to swap, as far as they are its own: guest memory.
///
/// # Panics
/// If the kernel refuses.
pub fn page_out(pid: u32) {
    // SAFETY: the call takes numbers.
    let handle = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    assert!(handle >= 0, "{}", io::Error::last_os_error());
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    for line in maps.lines().filter(|line| line.contains(" rw-p ")) {
        let (start, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        let [start, end] = [start, end].map(|text| usize::from_str_radix(text, 16).unwrap());
        if end - start < 16 << 20 {
            continue;
        }
        let range = libc::iovec { iov_base: start as *mut libc::c_void, iov_len: end - start };
        let (call, advice) = (libc::SYS_process_madvise, libc::MADV_PAGEOUT);
        // SAFETY: the range is memory of another process, of which the content does not change; the
        // call reads one range here.
        let done = unsafe { libc::syscall(call, handle, &raw const range, 1, advice, 0) };
        assert!(done >= 0, "{line}: {}", io::Error::last_os_error());
    }
    // SAFETY: the descriptor was made above, and is nobody else's.
    unsafe { libc::close(handle as i32) };
}
