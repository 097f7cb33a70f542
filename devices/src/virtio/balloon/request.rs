//! What the driver says on the balloon's queues: page numbers and statistics. Pure.

/// Bytes of a page of the balloon, whatever the pages of guest and host are (virtio 1.3, section
/// 5.5.6).
pub const PAGE_SIZE: u64 = 4096;

/// Bytes of a page number.
pub(super) const PFN_LEN: usize = 4;

/// Consecutive pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// Number of the first page.
    pub(super) first: u32,
    /// How many; at least 1.
    pub(super) pages: u32,
}

impl Run {
    /// Guest address of the first byte.
    pub(super) fn start(self) -> u64 {
        u64::from(self.first) * PAGE_SIZE
    }

    /// Bytes.
    pub(super) fn len(self) -> u64 {
        u64::from(self.pages) * PAGE_SIZE
    }
}

/// The pages of an array of page numbers, each once, in as few runs as there are. Numbers come in
/// any order; bytes that are not a whole number are left out.
pub(super) fn runs(array: &[u8]) -> Vec<Run> {
    let (numbers, _) = array.as_chunks::<PFN_LEN>();
    let mut pages: Vec<u32> = numbers.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
    pages.sort_unstable();
    pages.dedup();
    let mut runs: Vec<Run> = Vec::new();
    for page in pages {
        match runs.last_mut() {
            Some(run) if run.first.checked_add(run.pages) == Some(page) => run.pages += 1,
            _ => runs.push(Run { first: page, pages: 1 }),
        }
    }
    runs
}

/// Bytes of one statistic: a tag of 16 bits and a value of 64 (virtio 1.3, section 5.5.6.3).
const STAT_LEN: usize = 10;

/// Bytes of statistics that are looked at: 64 of them, some four times what there is.
pub(super) const MAX_STATS_LEN: usize = 64 * STAT_LEN;

/// What a guest says of its memory (virtio 1.3, section 5.5.6.4). What it does not say is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes swapped in.
    pub swap_in: Option<u64>,
    /// Bytes swapped out.
    pub swap_out: Option<u64>,
    /// Page faults that waited for storage.
    pub major_faults: Option<u64>,
    /// Page faults that did not.
    pub minor_faults: Option<u64>,
    /// Bytes that are not used for anything.
    pub free: Option<u64>,
    /// Bytes in all.
    pub total: Option<u64>,
    /// Bytes that programs could get without swapping.
    pub available: Option<u64>,
    /// Bytes of caches that could be had at once.
    pub disk_caches: Option<u64>,
    /// Huge pages given to programs.
    pub huge_page_allocations: Option<u64>,
    /// Huge pages that could not be given.
    pub huge_page_failures: Option<u64>,
    /// Processes killed for want of memory.
    pub oom_kills: Option<u64>,
    /// Allocations that had to wait for memory.
    pub allocation_stalls: Option<u64>,
    /// Pages scanned in the background.
    pub background_scans: Option<u64>,
    /// Pages scanned by who needed memory.
    pub direct_scans: Option<u64>,
    /// Pages reclaimed in the background.
    pub background_reclaims: Option<u64>,
    /// Pages reclaimed by who needed memory.
    pub direct_reclaims: Option<u64>,
}

impl Stats {
    /// Reads an array of statistics. Tags that are not known are left out, of several with the
    /// same tag the last counts.
    pub(super) fn parse(array: &[u8]) -> Self {
        let mut stats = Self::default();
        let (entries, _) = array.as_chunks::<STAT_LEN>();
        for [t0, t1, value @ ..] in entries {
            if let Some(field) = stats.field(u16::from_le_bytes([*t0, *t1])) {
                *field = Some(u64::from_le_bytes(*value));
            }
        }
        stats
    }

    fn field(&mut self, tag: u16) -> Option<&mut Option<u64>> {
        Some(match tag {
            0 => &mut self.swap_in,
            1 => &mut self.swap_out,
            2 => &mut self.major_faults,
            3 => &mut self.minor_faults,
            4 => &mut self.free,
            5 => &mut self.total,
            6 => &mut self.available,
            7 => &mut self.disk_caches,
            8 => &mut self.huge_page_allocations,
            9 => &mut self.huge_page_failures,
            10 => &mut self.oom_kills,
            11 => &mut self.allocation_stalls,
            12 => &mut self.background_scans,
            13 => &mut self.direct_scans,
            14 => &mut self.background_reclaims,
            15 => &mut self.direct_reclaims,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn array(pages: &[u32]) -> Vec<u8> {
        pages.iter().flat_map(|page| page.to_le_bytes()).collect()
    }

    #[test]
    fn neighbours_become_one_run_whatever_their_order() {
        assert_eq!(
            runs(&array(&[9, 7, 8, 3, 8, u32::MAX, u32::MAX - 1])),
            [
                Run { first: 3, pages: 1 },
                Run { first: 7, pages: 3 },
                Run { first: u32::MAX - 1, pages: 2 }
            ]
        );
        assert_eq!(runs(&[]), []);
        assert_eq!(runs(&[1, 2, 3]), []);
    }

    #[test]
    fn the_last_page_has_an_address() {
        let last = Run { first: u32::MAX, pages: 1 };
        assert_eq!(last.start() + last.len(), 1 << 44);
    }

    #[test]
    fn statistics_are_found_by_their_tags() {
        let mut array = Vec::new();
        for (tag, value) in [(5u16, 1u64 << 30), (4, 7), (999, 1), (4, 8)] {
            array.extend(tag.to_le_bytes());
            array.extend(value.to_le_bytes());
        }
        array.extend([5, 0, 1]);
        let expected = Stats { total: Some(1 << 30), free: Some(8), ..Stats::default() };
        assert_eq!(Stats::parse(&array), expected);
    }

    proptest! {
        #[test]
        fn runs_hold_each_page_once(
            pages in prop::collection::vec(prop_oneof![0..64u32, any::<u32>()], 0..300),
            rest in prop::collection::vec(any::<u8>(), 0..4),
        ) {
            let mut bytes = array(&pages);
            bytes.extend(rest.iter().take(3));
            let runs = runs(&bytes);
            let expected: BTreeSet<u64> = pages.iter().map(|&page| page.into()).collect();
            let mut found = BTreeSet::new();
            let mut end = 0;
            for run in runs {
                let first = u64::from(run.first);
                prop_assert!(found.is_empty() || first > end, "runs touch");
                end = first + u64::from(run.pages);
                found.extend(first..end);
            }
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn any_bytes_are_statistics(array in prop::collection::vec(any::<u8>(), 0..MAX_STATS_LEN)) {
            let known = array.chunks_exact(STAT_LEN).any(|entry| entry[0] < 16 && entry[1] == 0);
            prop_assert_eq!(Stats::parse(&array) != Stats::default(), known);
        }
    }

    #[test]
    fn fuzz_balloon_pages() {
        let corpus = [array(&[9, 7, 8, 3, u32::MAX]), array(&[0; 64]), vec![1, 2, 3]];
        crate::testing::fuzz("balloon pages", &corpus, |input| {
            let runs = runs(input);
            let mut end = None;
            for run in &runs {
                assert!(run.pages > 0 && end.is_none_or(|end| u64::from(run.first) > end));
                end = Some(u64::from(run.first) + u64::from(run.pages));
                assert!(run.start().checked_add(run.len()).is_some());
            }
            let pages: u64 = runs.iter().map(|run| u64::from(run.pages)).sum();
            assert!(pages <= (input.len() / PFN_LEN) as u64);
            (runs.len(), pages)
        });
    }

    #[test]
    fn fuzz_balloon_statistics() {
        let one = [&[5, 0][..], &[7; 8]].concat();
        crate::testing::fuzz("balloon statistics", &[one.repeat(3), one], |input| {
            let stats = Stats::parse(input);
            assert!(input.len() >= STAT_LEN || stats == Stats::default());
            [stats.free, stats.total, stats.swap_in, stats.direct_reclaims].map(|it| it.is_some())
        });
    }
}
