use std::io::Write;

use proptest::prelude::*;
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{FileOffset, GuestRegionMmap};

use super::*;
use crate::memory::Bytes;

const PAGE: u64 = PAGE_SIZE;
const LEN: u64 = 64 * PAGE;

fn region(start: u64, flags: i32, file: Option<FileOffset>) -> GuestRegionMmap<AtomicBitmap> {
    let bitmap = AtomicBitmap::new(LEN as usize, std::num::NonZeroUsize::new(4096).unwrap());
    let mut builder = MmapRegionBuilder::new_with_bitmap(LEN as usize, bitmap)
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(flags);
    if let Some(file) = file {
        builder = builder.with_file_offset(file);
    }
    GuestRegionMmap::new(builder.build().unwrap(), GuestAddress(start)).unwrap()
}

fn anonymous() -> Memory {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    Memory::from_regions(vec![region(0, flags, None), region(2 * LEN, flags, None)]).unwrap()
}

/// A mapping of a file that is full of 5.
fn file(flags: i32) -> (Memory, std::fs::File) {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&vec![5; LEN as usize]).unwrap();
    let offset = FileOffset::new(file.try_clone().unwrap(), 0);
    (Memory::from_regions(vec![region(0, flags, Some(offset))]).unwrap(), file)
}

fn fill(memory: &Memory, start: u64, len: u64) {
    memory.write_slice(&vec![7; len as usize], GuestAddress(start)).unwrap();
}

fn byte(memory: &Memory, page: u64) -> u8 {
    memory.read_obj(GuestAddress(page * PAGE)).unwrap()
}

/// Pages of anonymous memory that are in RAM, from guest address 0 on.
fn resident(memory: &Memory, pages: u64) -> usize {
    let start = memory.get_host_address(GuestAddress(0)).unwrap();
    let mut answer = vec![0u8; pages as usize];
    let len = (pages * PAGE) as usize;
    // SAFETY: the range is mapped, and there is a byte of room for each of its pages.
    let result = unsafe { libc::mincore(start.cast(), len, answer.as_mut_ptr()) };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
    answer.iter().filter(|byte| *byte & 1 != 0).count()
}

/// A field of `/proc/self/smaps` in kibibytes, summed over what is mapped in `memory`'s first
/// region.
fn smaps(memory: &Memory, field: &str) -> u64 {
    let start = memory.get_host_address(GuestAddress(0)).unwrap().addr();
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut inside = false;
    let mut sum = 0;
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        if let Some((from, to)) = first.split_once('-') {
            let number = |text| usize::from_str_radix(text, 16);
            if let (Ok(from), Ok(to)) = (number(from), number(to)) {
                inside = from >= start && to <= start + LEN as usize;
            }
        } else if inside && first == field {
            sum += words.next().unwrap().parse::<u64>().unwrap();
        }
    }
    sum
}

#[test]
fn anonymous_pages_leave_the_process_and_come_back_empty() {
    let memory = anonymous();
    fill(&memory, 0, LEN);
    assert_eq!(resident(&memory, 64), 64);
    let outcome = Reclaimer::new().release(&memory, 8 * PAGE, 32 * PAGE);
    assert_eq!(outcome, Outcome { released: 32 * PAGE, ..Outcome::default() });
    assert_eq!(resident(&memory, 64), 32);
    assert_eq!([7, 8, 39, 40].map(|page| byte(&memory, page)), [7, 0, 0, 7]);
}

#[test]
fn released_pages_are_dirty() {
    let memory = anonymous();
    let region = memory.find_region(GuestAddress(0)).unwrap();
    Reclaimer::new().release(&memory, 8 * PAGE, PAGE);
    let bitmap = GuestMemoryRegion::bitmap(region);
    let dirty = [7, 8, 9].map(|page| bitmap.dirty_at((page * PAGE) as usize));
    assert_eq!(dirty, [false, true, false]);
}

#[test]
fn only_whole_pages_are_given_back() {
    let memory = anonymous();
    fill(&memory, 0, LEN);
    let outcome = Reclaimer::new().release(&memory, PAGE - 1, PAGE + 2);
    assert_eq!(outcome, Outcome { released: PAGE, kept: 2, refused: 0 });
    assert_eq!([0, 1, 2].map(|page| byte(&memory, page)), [7, 0, 7]);
    let inside = Reclaimer::new().release(&memory, 4 * PAGE + 1, PAGE - 2);
    assert_eq!(inside, Outcome { released: 0, kept: PAGE - 2, refused: 0 });
}

#[test]
fn what_is_not_memory_is_refused_and_the_rest_released() {
    let memory = anonymous();
    fill(&memory, 0, LEN);
    fill(&memory, 2 * LEN, LEN);
    let outcome = Reclaimer::new().release(&memory, LEN - PAGE, LEN + 2 * PAGE);
    assert_eq!(outcome, Outcome { released: 2 * PAGE, kept: 0, refused: LEN });
    assert_eq!([62, 63, 128, 129].map(|page| byte(&memory, page)), [7, 0, 0, 7]);
    let end = Reclaimer::new().release(&memory, u64::MAX - 10, 100);
    assert_eq!(end, Outcome { refused: 10, ..Outcome::default() });
}

#[test]
fn a_private_file_mapping_does_not_get_the_file_back() {
    let (memory, _file) = file(libc::MAP_PRIVATE | libc::MAP_NORESERVE);
    fill(&memory, 0, 16 * PAGE);
    assert_eq!(smaps(&memory, "Rss:"), 64);
    let mut reclaimer = Reclaimer::new();
    let outcome = reclaimer.release(&memory, 8 * PAGE, 32 * PAGE);
    assert_eq!(outcome, Outcome { released: 32 * PAGE, ..Outcome::default() });
    assert_eq!(smaps(&memory, "Rss:"), 32);
    assert_eq!([7, 8, 39, 40].map(|page| byte(&memory, page)), [7, 0, 0, 5]);

    // Again, by the cheaper way.
    fill(&memory, 9 * PAGE, 2 * PAGE);
    reclaimer.release(&memory, 9 * PAGE, PAGE);
    assert_eq!([9, 10].map(|page| byte(&memory, page)), [0, 7]);
    // And by someone who does not know of it.
    Reclaimer::new().release(&memory, 10 * PAGE, PAGE);
    assert_eq!(byte(&memory, 10), 0);
}

#[test]
fn shared_memory_is_taken_from_everybody() {
    let (memory, file) = file(libc::MAP_SHARED);
    let outcome = Reclaimer::new().release(&memory, 8 * PAGE, PAGE);
    assert_eq!(outcome.released, PAGE);
    let mut content = [1; 2];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut content, 9 * PAGE - 1).unwrap();
    assert_eq!(content, [0, 5]);
}

#[test]
fn a_host_that_refuses_changes_nothing() {
    let memory = anonymous();
    fill(&memory, 0, LEN);
    let start = memory.get_host_address(GuestAddress(0)).unwrap();
    // SAFETY: the page is mapped; a locked page may not be given back.
    assert_eq!(unsafe { libc::mlock(start.cast(), 4096) }, 0);
    let mut reclaimer = Reclaimer::new();
    let outcome = reclaimer.release(&memory, 0, PAGE);
    assert_eq!(outcome, Outcome { kept: PAGE, ..Outcome::default() });
    assert_eq!((byte(&memory, 0), reclaimer.failures), (7, 1));
}

#[test]
fn scattered_pages_do_not_use_up_the_mappings() {
    let mut pieces = Pieces::default();
    let page = 4096;
    assert!((0..10).all(|at| pieces.insert(2 * at * page, page, 10)));
    assert!(!pieces.insert(100 * page, page, 10));
    assert!(pieces.insert(page, page, 10), "a neighbour needs no further piece");
    assert!(pieces.insert(100 * page, page, 10));
    assert!(pieces.contain(0, 3 * page) && !pieces.contain(0, 4 * page));
    assert!(!pieces.contain(99 * page, 2 * page));
}

proptest! {
    #[test]
    fn pieces_hold_what_was_inserted(inserts in prop::collection::vec((0..100usize, 1..10usize), 1..60)) {
        let mut pieces = Pieces::default();
        let mut model = [false; 120];
        for (start, len) in inserts {
            let fits = pieces.insert(start, len, 8);
            if fits {
                model[start..start + len].fill(true);
            }
            prop_assert!(pieces.0.len() <= 8);
            let touching = pieces.0.iter().zip(pieces.0.iter().skip(1));
            prop_assert!(touching.clone().all(|((_, end), (next, _))| end < next));
            for (at, inside) in model.iter().enumerate() {
                prop_assert_eq!(pieces.contain(at, 1), *inside);
            }
        }
    }
}
