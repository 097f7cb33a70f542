//! Which pages of guest RAM a difference is about: a list of runs of pages, each either zeros or data
//! that is in another file.
//!
//! The data of the runs that have any is in that file one after the other, in the order of the list,
//! which need not be that of memory: pages that were written to while the first were copied come after
//! them.

use std::ops::Range;

use super::sums::PAGE;

/// A run of pages that differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Which.
    pub pages: Range<u64>,
    /// Where their content is in the file of pages; nothing: they are all zeros, so that it is
    /// written nowhere.
    pub at: Option<u64>,
}

impl Run {
    /// Its bytes of memory.
    fn bytes(&self) -> u64 {
        (self.pages.end - self.pages.start) * PAGE as u64
    }
}

/// Bytes of a run in a list: its first page, and how many there are, with the highest bit for zeros.
const ENTRY: usize = 16;
const ZERO: u64 = 1 << 63;

/// Most bytes of a list, of so many bytes of RAM.
pub fn most_bytes(bytes: u64) -> u64 {
    bytes / PAGE as u64 * ENTRY as u64
}

/// Why a list of runs is refused.
#[derive(Debug, thiserror::Error)]
#[error(
    "its run of {count} pages from page {first} on has pages of another one, or is not in memory"
)]
pub struct BadRun {
    first: u64,
    count: u64,
}

/// The bytes of the list of those runs, whose data is one after the other.
pub fn to_bytes(runs: &[Run]) -> Vec<u8> {
    let mut sorted: Vec<&Run> = runs.iter().collect();
    sorted.sort_by_key(|run| run.at.unwrap_or(u64::MAX));
    let words = sorted.into_iter().flat_map(|run| {
        let count = run.pages.end - run.pages.start;
        [run.pages.start, if run.at.is_none() { count | ZERO } else { count }]
    });
    words.flat_map(u64::to_le_bytes).collect()
}

/// Reads a list, of `bytes` of RAM, that nobody vouches for. The runs are in the order of memory.
pub fn from_bytes(list: &[u8], bytes: u64) -> Result<Vec<Run>, BadRun> {
    let (mut runs, mut data) = (Vec::with_capacity(list.len() / ENTRY), 0);
    for entry in list.chunks(ENTRY) {
        let word = |at: usize| -> u64 {
            let bytes = entry.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
            bytes.map_or(0, u64::from_le_bytes)
        };
        let (first, count, zero) = (word(0), word(8) & !ZERO, word(8) & ZERO != 0);
        let end = first.saturating_add(count);
        if entry.len() != ENTRY || count == 0 || end > bytes / PAGE as u64 {
            return Err(BadRun { first, count });
        }
        let run = Run { pages: first..end, at: (!zero).then_some(data) };
        // Not more than memory has, in which each run is: but there may be many.
        data = if zero { data } else { data.saturating_add(run.bytes()) };
        runs.push(run);
    }
    runs.sort_unstable_by_key(|run| run.pages.start);
    let overlap = runs.windows(2).find_map(|pair| match pair {
        [one, next] if next.pages.start < one.pages.end => Some(&next.pages),
        _ => None,
    });
    match overlap {
        Some(pages) => Err(BadRun { first: pages.start, count: pages.end - pages.start }),
        None => Ok(runs),
    }
}

/// Bytes of the pages that are written for those runs.
pub fn data_bytes(runs: &[Run]) -> u64 {
    runs.iter().filter(|run| run.at.is_some()).map(Run::bytes).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn parse(words: &[u64]) -> Result<Vec<Run>, BadRun> {
        from_bytes(&list(words), 1 << 20)
    }

    #[test]
    fn lists_of_runs_that_cannot_be_are_refused() {
        assert_eq!(parse(&[0, 1, 1, ZERO | 2, 255, 1]).unwrap().len(), 3);
        for words in [
            &[0, 0][..],
            &[0, ZERO],
            &[255, 2],
            &[u64::MAX, 1],
            &[5, 1, 5, 1],
            &[5, 2, 4, 2],
            &[5, 2, 9, 1, 6, ZERO | 1],
            &[1],
            &[1, ZERO - 1],
        ] {
            assert!(parse(words).is_err(), "{words:?}");
        }
    }

    #[test]
    fn data_is_in_the_order_of_the_list_and_runs_in_that_of_memory() {
        let runs = parse(&[8, 2, 3, 1, 1, ZERO | 2, 20, 1]).unwrap();
        let run = |pages, at: Option<u64>| Run { pages, at: at.map(|page| page * PAGE as u64) };
        let sorted =
            [run(1..3, None), run(3..4, Some(2)), run(8..10, Some(0)), run(20..21, Some(3))];
        assert_eq!(runs, sorted);
        assert_eq!(data_bytes(&runs), 4 * PAGE as u64);
        assert_eq!(from_bytes(&to_bytes(&runs), 1 << 20).unwrap(), runs);
        // As lists of older versions are.
        assert_eq!(to_bytes(&parse(&[3, 1, 8, 2]).unwrap()), list(&[3, 1, 8, 2]));
    }
}
