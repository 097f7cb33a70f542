//! Requests, well-formed and not, on a file.

use std::os::unix::fs::MetadataExt;

use proptest::prelude::*;

use super::*;

#[test]
fn a_sector_is_read() {
    let mut bench = Bench::new(false);
    assert_eq!(bench.request(kind::IN, 5, &[], 512), (OK, 513, vec![6; 512]));
}

#[test]
fn sectors_are_written_and_nothing_else() {
    let mut bench = Bench::new(false);
    let mut expected = bench.disk();
    expected[1024..2048].fill(0xab);
    assert_eq!(bench.request(kind::OUT, 2, &[0xab; 1024], 0), (OK, 1, vec![]));
    assert_eq!(bench.disk(), expected);
}

#[test]
fn flush_is_answered() {
    let mut bench = Bench::new(false);
    assert_eq!(bench.request(kind::FLUSH, 0, &[], 0).0, OK);
}

#[test]
fn the_identity_fills_what_room_there_is() {
    let mut bench = Bench::new(false);
    let padded = [&b"disk-7"[..], &[0; 14]].concat();
    assert_eq!(bench.request(kind::GET_ID, 0, &[], 20), (OK, 21, padded.clone()));
    assert_eq!(bench.request(kind::GET_ID, 0, &[], 4), (OK, 5, b"disk".to_vec()));
    assert_eq!(bench.request(kind::GET_ID, 0, &[], 0), (OK, 1, vec![]));
    // The length must not count bytes after a gap that was not written.
    assert_eq!(bench.request(kind::GET_ID, 0, &[], 32), (OK, 20, [padded, vec![0; 12]].concat()));
}

#[test]
fn what_is_not_on_the_disk_is_refused_and_touches_nothing() {
    let mut bench = Bench::new(false);
    let before = bench.disk();
    for sector in [SECTORS, SECTORS - 1, u64::MAX, u64::MAX / 512] {
        assert_eq!(bench.request(kind::IN, sector, &[], 1024), (IO_ERROR, 0, vec![0; 1024]));
        assert_eq!(bench.request(kind::OUT, sector, &[9; 1024], 0), (IO_ERROR, 1, vec![]));
    }
    for odd in [511, 513, 1] {
        assert_eq!(bench.request(kind::IN, 0, &[], odd).0, IO_ERROR);
        assert_eq!(bench.request(kind::OUT, 0, &vec![9; odd], 0).0, IO_ERROR);
    }
    assert_eq!(bench.disk(), before);
    assert_eq!(bench.file.as_file().metadata().unwrap().len(), SECTORS * SECTOR_SIZE);
}

#[test]
fn unknown_types_are_unsupported() {
    let mut bench = Bench::new(false);
    for kind in [2, 3, 14, u32::MAX] {
        assert_eq!(bench.request(kind, 0, &[0; 64], 64).0, UNSUPPORTED);
    }
}

#[test]
fn a_header_in_sixteen_pieces_is_one_header() {
    let mut bench = Bench::new(false);
    let driver = &mut bench.driver;
    let head = driver.alloc_with(&header(kind::IN, 7));
    let answer = driver.alloc(513);
    let byte = |place: u64| Buffer::readable(GuestAddress(head.0 + place), 1);
    let mut chain: Vec<_> = (0..16).map(byte).collect();
    let piece = |place: u64, len| Buffer::writable(GuestAddress(answer.0 + place), len);
    chain.extend([piece(0, 100), piece(100, 0), piece(100, 400), piece(500, 13)]);
    assert_eq!(driver.exchange(0, &chain), 513);
    assert_eq!(driver.bytes(answer, 513), [vec![8; 512], vec![OK]].concat());
}

#[test]
fn header_and_data_may_share_a_descriptor() {
    let mut bench = Bench::new(false);
    let driver = &mut bench.driver;
    let out = driver.alloc_with(&[header(kind::OUT, 0), vec![0x77; 512]].concat());
    let status = driver.alloc_with(&[0xee]);
    let chain = [Buffer::readable(out, 528), Buffer::writable(status, 1)];
    driver.add_indirect(0, &chain);
    driver.kick(0);
    assert_eq!(driver.wait_used(0).len, 1);
    assert_eq!(driver.bytes(status, 1), [OK]);
    assert_eq!(bench.disk()[..512], [0x77; 512]);
}

#[test]
fn a_short_header_is_an_error() {
    let mut bench = Bench::new(false);
    let driver = &mut bench.driver;
    let (head, status) = (driver.alloc(16), driver.alloc_with(&[0xee]));
    for len in [0, 1, 8, 15] {
        let chain = [Buffer::readable(head, len), Buffer::writable(status, 1)];
        assert_eq!(driver.exchange(0, &chain), 1);
        assert_eq!(driver.bytes(status, 1), [IO_ERROR]);
    }
    assert_eq!(driver.exchange(0, &[Buffer::writable(status, 1)]), 1);
}

#[test]
fn a_request_without_a_place_for_the_status_comes_back_unanswered() {
    let mut bench = Bench::new(false);
    let before = bench.disk();
    let driver = &mut bench.driver;
    let head = driver.alloc_with(&header(kind::OUT, 0));
    let data = driver.alloc(512);
    let chains = [
        vec![Buffer::readable(head, 16), Buffer::readable(data, 512)],
        vec![Buffer::readable(head, 16), Buffer::readable(data, 512), Buffer::writable(head, 0)],
    ];
    for chain in chains {
        assert_eq!(driver.exchange(0, &chain), 0);
    }
    reads_a_sector(driver);
    assert_eq!(bench.disk(), before);
}

#[test]
fn a_read_only_disk_is_not_written_whatever_was_negotiated() {
    let mut bench = Bench::new(true);
    let (before, metadata) = (bench.disk(), bench.file.as_file().metadata().unwrap());
    bench.driver.reset();
    bench.driver.initialize_without(feature::RO);
    let range = [0, 1].map(u64::to_le_bytes).concat();
    assert_eq!(bench.request(kind::OUT, 0, &[9; 512], 0).0, IO_ERROR);
    assert_eq!(bench.request(kind::DISCARD, 0, &range, 0).0, IO_ERROR);
    assert_eq!(bench.request(kind::WRITE_ZEROES, 0, &range, 0).0, IO_ERROR);
    assert_eq!(bench.request(kind::FLUSH, 0, &[], 0).0, OK);
    assert_eq!(bench.request(kind::IN, 0, &[], 512).0, OK);
    let after = bench.file.as_file().metadata().unwrap();
    assert_eq!((after.mtime(), after.mtime_nsec()), (metadata.mtime(), metadata.mtime_nsec()));
    assert_eq!(bench.disk(), before);
}

#[test]
fn zeroed_and_discarded_ranges_read_as_zeroes() {
    let mut bench = Bench::new(false);
    let mut expected = bench.disk();
    expected[1024..2048].fill(0);
    expected[4096..4608].fill(0);
    let range = |sector: u64, sectors: u32, flags: u32| {
        [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
    };
    let two = [range(2, 2, 1), range(8, 1, 0)].concat();
    assert_eq!(bench.request(kind::WRITE_ZEROES, 0, &two, 0).0, OK);
    assert_eq!(bench.disk(), expected);
    expected[..512].fill(0);
    assert_eq!(bench.request(kind::DISCARD, 0, &range(0, 1, 0), 0).0, OK);
    assert_eq!(bench.disk(), expected);
    assert_eq!(bench.request(kind::DISCARD, 0, &range(0, 1, 1), 0).0, UNSUPPORTED);
    assert_eq!(bench.request(kind::DISCARD, 0, &range(63, 2, 0), 0).0, IO_ERROR);
    assert_eq!(bench.request(kind::WRITE_ZEROES, 0, &range(u64::MAX, 1, 0), 0).0, IO_ERROR);
    assert_eq!(bench.request(kind::WRITE_ZEROES, 0, &range(0, 1, 0)[..15], 0).0, IO_ERROR);
    assert_eq!(bench.disk(), expected);
}

#[test]
fn a_file_that_was_cut_gives_an_error_and_the_bytes_there_were() {
    let mut bench = Bench::new(false);
    bench.file.as_file().set_len(700).unwrap();
    let (status, len, data) = bench.request(kind::IN, 0, &[], 1024);
    assert_eq!((status, len), (IO_ERROR, 700));
    assert_eq!(data[..700], [vec![1; 512], vec![2; 188]].concat());
    assert!(!bench.driver.needs_reset());
}

#[test]
fn a_full_queue_is_answered() {
    let mut bench = Bench::new(false);
    let driver = &mut bench.driver;
    let head = driver.alloc_with(&header(kind::IN, 1));
    let answer = driver.alloc(513);
    let chain = [Buffer::readable(head, 16), Buffer::writable(answer, 513)];
    let heads: Vec<_> = (0..128).map(|_| driver.add(0, &chain)).collect();
    driver.kick(0);
    // Before a look at the ring: who has taken the chains by himself is owed no interrupt.
    driver.wait_interrupt(1);
    let mut back: Vec<_> = (0..128).map(|_| driver.wait_used(0).head).collect();
    back.sort_unstable();
    let mut heads = heads;
    heads.sort_unstable();
    assert_eq!(back, heads);
}

#[derive(Clone, Debug)]
struct Step {
    write: bool,
    sector: u64,
    sectors: u64,
    cuts: Vec<u16>,
    indirect: bool,
    fill: u8,
}

fn step() -> impl Strategy<Value = Step> {
    let cuts = prop::collection::vec(any::<u16>(), 0..8);
    (any::<bool>(), 0..SECTORS + 4, 0_u64..12, cuts, any::<bool>(), any::<u8>()).prop_map(
        |(write, sector, sectors, cuts, indirect, fill)| Step {
            write,
            sector,
            sectors,
            cuts,
            indirect,
            fill,
        },
    )
}

/// `total` bytes at `start`, cut into pieces in places that `cuts` choose.
fn pieces(start: GuestAddress, total: u64, cuts: &[u16], writable: bool) -> Vec<Buffer> {
    let mut places: Vec<u64> = cuts.iter().map(|cut| u64::from(*cut) % (total + 1)).collect();
    places.extend([0, total]);
    places.sort_unstable();
    let piece = |pair: &[u64]| {
        let (address, len) = (GuestAddress(start.0 + pair[0]), (pair[1] - pair[0]) as u32);
        if writable { Buffer::writable(address, len) } else { Buffer::readable(address, len) }
    };
    places.windows(2).map(piece).collect()
}

fn apply(driver: &mut GuestDriver, model: &mut [u8], step: &Step) {
    let len = step.sectors * SECTOR_SIZE;
    let kind = if step.write { kind::OUT } else { kind::IN };
    let mut out = header(kind, step.sector);
    if step.write {
        out.extend((0..len).map(|byte| (byte as u8).wrapping_mul(31).wrapping_add(step.fill)));
    }
    let room = if step.write { 1 } else { len + 1 };
    let request = driver.alloc_with(&out);
    let answer = driver.alloc_with(&vec![0xee; room as usize]);
    let mut chain = pieces(request, out.len() as u64, &step.cuts, false);
    chain.extend(pieces(answer, room, &step.cuts, true));
    let head = match step.indirect {
        true => driver.add_indirect(0, &chain),
        false => driver.add(0, &chain),
    };
    driver.kick(0);
    let used = driver.wait_used(0);
    let answer = driver.bytes(answer, room as usize);
    let (status, data) = answer.split_last().unwrap();
    let extent = (step.sector * SECTOR_SIZE) as usize..((step.sector * SECTOR_SIZE) + len) as usize;
    assert_eq!(used.head, head);
    match model.get_mut(extent) {
        Some(extent) if step.write => {
            extent.copy_from_slice(&out[16..]);
            assert_eq!((*status, used.len), (OK, 1));
        }
        Some(extent) => {
            assert_eq!((*status, u64::from(used.len)), (OK, len + 1));
            assert_eq!(data, extent);
        }
        None => assert_eq!(*status, IO_ERROR),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn any_sequence_of_requests_does_what_a_plain_array_does(
        steps in prop::collection::vec(step(), 1..24),
    ) {
        let mut bench = Bench::new(false);
        let mut model = bench.disk();
        for step in &steps {
            apply(&mut bench.driver, &mut model, step);
        }
        prop_assert!(bench.disk() == model);
    }
}
