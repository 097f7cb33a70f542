//! Code that has been needed once. The kernel maps a whole neighbourhood of each page of code that is
//! run, so a process that has read its command line, made its machine and booted its guest has nearly
//! all of its program in memory, and goes on with a third of it.

use std::ffi::{c_int, c_void};
use std::ptr;

/// Lets go of the pages of this program's code. What is needed again comes back from the page cache,
/// at a minor fault for each neighbourhood. Any thread may call this at any time.
pub fn let_go() {
    // SAFETY: the callback has the type that is asked for, does not unwind and keeps nothing.
    unsafe { libc::dl_iterate_phdr(Some(of_object), ptr::null_mut()) };
}

/// Called for each loaded object, this program first (`dl_iterate_phdr(3)`).
unsafe extern "C" fn of_object(
    object: *mut libc::dl_phdr_info,
    _size: usize,
    _data: *mut c_void,
) -> c_int {
    // SAFETY: the caller gives a pointer to such a structure, valid during the call.
    let object = unsafe { &*object };
    if object.dlpi_phdr.is_null() {
        return 1;
    }
    // SAFETY: the object has so many program headers, for as long as it is loaded.
    let headers =
        unsafe { std::slice::from_raw_parts(object.dlpi_phdr, usize::from(object.dlpi_phnum)) };
    for header in headers {
        // Code only: it is never relocated, so each page is the file's. Other read-only segments have
        // been written to at the start, and would lose that.
        let code = header.p_flags & (libc::PF_X | libc::PF_W) == libc::PF_X;
        if header.p_type == libc::PT_LOAD && code {
            release(object.dlpi_addr + header.p_vaddr, header.p_memsz);
        }
    }
    // Not the libraries, which others use too.
    1
}

fn release(start: u64, len: u64) {
    const PAGE: u64 = 4096;
    let first = start.next_multiple_of(PAGE);
    let end = (start + len) / PAGE * PAGE;
    if end <= first {
        return;
    }
    let (address, len) = (ptr::without_provenance_mut(first as usize), (end - first) as usize);
    // SAFETY: the range is code of this program, a private mapping of its file that nobody has
    // written to: what comes back is what was there. A failure changes nothing.
    unsafe { libc::madvise(address, len, libc::MADV_DONTNEED) };
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// KiB of code of this program that are in its memory.
    fn resident() -> u64 {
        let exe = std::env::current_exe().unwrap();
        let mut ours = false;
        let mut sum = 0;
        for line in fs::read_to_string("/proc/self/smaps").unwrap().lines() {
            if let Some(size) = line.strip_prefix("Rss:") {
                let kib: u64 = size.trim().trim_end_matches(" kB").parse().unwrap();
                sum += if ours { kib } else { 0 };
            } else if line.contains('-') {
                ours = line.contains("r-xp") && line.ends_with(exe.to_str().unwrap());
            }
        }
        sum
    }

    #[test]
    fn most_of_the_code_goes_and_all_of_it_still_runs() {
        // Formats, sorts and parses, to have something in memory.
        let words = |seed: u64| {
            let mut words: Vec<String> = (0..100).map(|n| format!("{:x}", n * seed % 97)).collect();
            words.sort();
            words.join(" ")
        };
        let before = words(31);
        let held = resident();
        let_go();
        let left = resident();
        assert!(left < held, "{left} KiB of {held}");
        assert_eq!(words(31), before);
    }
}
