use proptest::prelude::*;

use super::*;

const LIMITS: Limits = Limits { sectors: 100, read_only: false };
const READ_ONLY: Limits = Limits { sectors: 100, read_only: true };

fn header(kind: u32, sector: u64) -> [u8; HEADER_SIZE] {
    let mut header = [0xee; HEADER_SIZE];
    header[..4].copy_from_slice(&kind.to_le_bytes());
    header[8..].copy_from_slice(&sector.to_le_bytes());
    header
}

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

#[test]
fn reads_and_writes_become_extents() {
    let extent = Extent { offset: 99 * 512, len: 512 };
    assert_eq!(parse(header(kind::IN, 99), 0, 512, LIMITS), Ok(Command::Read(extent)));
    assert_eq!(parse(header(kind::OUT, 99), 512, 0, LIMITS), Ok(Command::Write(extent)));
}

#[test]
fn what_is_beyond_the_end_or_not_whole_sectors_is_refused() {
    let bad = [
        (99, 1024),
        (100, 512),
        (101, 0),
        (u64::MAX, 512),
        (u64::MAX, 0),
        (u64::MAX / 512, 512),
        (0, 511),
        (0, 513),
        (0, u64::MAX),
        (0, 101 * 512),
    ];
    for (sector, len) in bad {
        assert_eq!(parse(header(kind::IN, sector), 0, len, LIMITS), Err(Status::IoError));
        assert_eq!(parse(header(kind::OUT, sector), len, 0, LIMITS), Err(Status::IoError));
    }
}

#[test]
fn a_read_only_disk_takes_nothing_that_changes_it() {
    for kind in [kind::OUT, kind::DISCARD, kind::WRITE_ZEROES] {
        assert_eq!(parse(header(kind, 0), 512, 0, READ_ONLY), Err(Status::IoError));
    }
    for kind in [kind::IN, kind::FLUSH, kind::GET_ID] {
        assert!(parse(header(kind, 0), 0, 512, READ_ONLY).is_ok());
    }
}

#[test]
fn unknown_types_are_unsupported() {
    // Among them SCSI passthrough, zoned commands and the secure erase that is not offered.
    for kind in [2, 3, 5, 6, 7, 9, 10, 12, 14, 15, 0x8000_0000, u32::MAX] {
        assert_eq!(parse(header(kind, 0), 512, 512, LIMITS), Err(Status::Unsupported));
    }
}

#[test]
fn range_requests_need_whole_ranges_and_not_too_many() {
    let most = (MAX_RANGES * RANGE_SIZE) as u64;
    for len in [0, 15, 17, most + 16, u64::MAX] {
        assert_eq!(parse(header(kind::DISCARD, 0), len, 0, LIMITS), Err(Status::IoError));
    }
    for len in [16, most] {
        assert_eq!(parse(header(kind::DISCARD, 0), len, 0, LIMITS), Ok(Command::Discard));
        assert_eq!(parse(header(kind::WRITE_ZEROES, 0), len, 0, LIMITS), Ok(Command::WriteZeroes));
    }
}

#[test]
fn ranges_become_extents_and_empty_ones_vanish() {
    let data = [range(0, 1, 0), range(50, 0, 0), range(98, 2, 0)].concat();
    let found = ranges(&data, Command::Discard, LIMITS).unwrap();
    let expected = [Extent { offset: 0, len: 512 }, Extent { offset: 98 * 512, len: 1024 }];
    assert_eq!(found.extents, expected);
}

#[test]
fn ranges_beyond_the_end_are_refused_as_a_whole() {
    for bad in [range(100, 1, 0), range(99, 2, 0), range(u64::MAX, 1, 0), range(0, u32::MAX, 0)] {
        let data = [range(0, 1, 0), bad].concat();
        assert_eq!(ranges(&data, Command::Discard, LIMITS), Err(Status::IoError));
        assert_eq!(ranges(&data, Command::WriteZeroes, LIMITS), Err(Status::IoError));
    }
}

#[test]
fn a_range_that_is_too_long_is_refused() {
    let limits = Limits { sectors: u64::MAX / 512, read_only: false };
    let data = range(0, MAX_RANGE_SECTORS + 1, 0);
    assert_eq!(ranges(&data, Command::Discard, limits), Err(Status::IoError));
    assert!(ranges(&range(0, MAX_RANGE_SECTORS, 0), Command::Discard, limits).is_ok());
}

#[test]
fn flags_are_unmap_for_zeroes_and_nothing_else() {
    let unmap = |data: &[u8], command| ranges(data, command, LIMITS).map(|found| found.unmap);
    assert_eq!(unmap(&range(0, 1, 1), Command::WriteZeroes), Ok(true));
    assert_eq!(unmap(&range(0, 1, 0), Command::WriteZeroes), Ok(false));
    assert_eq!(unmap(&range(0, 1, 2), Command::WriteZeroes), Err(Status::Unsupported));
    assert_eq!(unmap(&range(0, 1, 1), Command::Discard), Err(Status::Unsupported));
    let mixed = [range(0, 1, 1), range(1, 1, 0)].concat();
    assert_eq!(unmap(&mixed, Command::WriteZeroes), Ok(false));
}

proptest! {
    #[test]
    fn whatever_is_accepted_is_on_the_disk(
        header: [u8; HEADER_SIZE],
        low_kind in 0_u8..16,
        sector in prop_oneof![any::<u64>(), 0_u64..200],
        out_len in prop_oneof![any::<u64>(), 0_u64..100_000],
        in_len in prop_oneof![any::<u64>(), 0_u64..100_000],
    ) {
        let mut header = header;
        header[..4].copy_from_slice(&[low_kind, 0, 0, 0]);
        header[8..].copy_from_slice(&sector.to_le_bytes());
        match parse(header, out_len, in_len, LIMITS) {
            Ok(Command::Read(extent)) => prop_assert!(on_disk(&extent) && extent.len == in_len),
            Ok(Command::Write(extent)) => prop_assert!(on_disk(&extent) && extent.len == out_len),
            _ => {}
        }
    }

    #[test]
    fn whatever_range_is_accepted_is_on_the_disk(
        data in prop::collection::vec(any::<u8>(), 0..300),
        zeroes: bool,
    ) {
        let command = if zeroes { Command::WriteZeroes } else { Command::Discard };
        if let Ok(found) = ranges(&data, command, LIMITS) {
            prop_assert!(found.extents.iter().all(on_disk));
        }
    }

    #[test]
    fn plausible_ranges_are_accepted_exactly_if_they_fit(sector in 0_u64..150, sectors in 0_u32..150) {
        let fits = sector + u64::from(sectors) <= LIMITS.sectors;
        let found = ranges(&range(sector, sectors, 0), Command::WriteZeroes, LIMITS);
        prop_assert_eq!(found.is_ok(), fits);
    }
}

fn on_disk(extent: &Extent) -> bool {
    extent.offset.checked_add(extent.len).is_some_and(|end| end <= LIMITS.sectors * SECTOR_SIZE)
}
