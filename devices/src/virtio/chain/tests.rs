use std::io::{Read, Write};
use std::ops::Range;

use proptest::prelude::*;

use super::*;
use crate::testing::{Descriptor as Entry, HIGH_RAM, HOLE, RAM_SIZE, flags, ram};

const TABLE: GuestAddress = GuestAddress(0x1000);
const SECOND_TABLE: GuestAddress = GuestAddress(0x2000);
const SIZE: u16 = 8;

/// Where RAM is, said once more, for the model.
const RAM: [Range<u64>; 2] = [0..RAM_SIZE, HIGH_RAM.0..HIGH_RAM.0 + RAM_SIZE];

fn put(memory: &Memory, table: GuestAddress, entries: &[Entry]) {
    for (place, entry) in (0_u64..).zip(entries) {
        let address = GuestAddress(table.0 + 16 * place);
        memory.write_obj(entry.address.to_le(), address).unwrap();
        memory.write_obj(entry.len.to_le(), GuestAddress(address.0 + 8)).unwrap();
        memory.write_obj(entry.flags.to_le(), GuestAddress(address.0 + 12)).unwrap();
        memory.write_obj(entry.next.to_le(), GuestAddress(address.0 + 14)).unwrap();
    }
}

fn parse(memory: &Memory, head: u16, indirect: bool) -> Result<Chain, ChainFault> {
    Chain::parse(memory, TABLE, SIZE, head, indirect)
}

fn entry(address: u64, len: u32, flags: u16, next: u16) -> Entry {
    Entry { address, len, flags, next }
}

/// A chain of `readable` and `writable` pieces.
fn chain_of(memory: &Memory, readable: &[(u64, u32)], writable: &[(u64, u32)]) -> Chain {
    let all =
        readable.iter().map(|piece| (piece, 0)).chain(writable.iter().map(|p| (p, flags::WRITE)));
    let count = readable.len() + writable.len();
    let entries: Vec<_> = all
        .enumerate()
        .map(|(place, (&(address, len), write))| {
            let more = if place + 1 < count { flags::NEXT } else { 0 };
            entry(address, len, write | more, place as u16 + 1)
        })
        .collect();
    put(memory, SECOND_TABLE, &entries);
    put(memory, TABLE, &[entry(SECOND_TABLE.0, 16 * count as u32, flags::INDIRECT, 0)]);
    Chain::parse(memory, TABLE, 256, 0, true).unwrap()
}

#[test]
fn a_chain_is_what_the_device_reads_and_then_what_it_writes() {
    let memory = ram();
    let entries = [
        entry(0x5000, 10, flags::NEXT, 3),
        Entry::default(),
        Entry::default(),
        entry(0x6000, 20, flags::NEXT | flags::WRITE, 5),
        Entry::default(),
        entry(0x7000, 30, flags::WRITE, 0),
    ];
    put(&memory, TABLE, &entries);
    let chain = parse(&memory, 0, false).unwrap();
    let segment = |address, len| Segment { address: GuestAddress(address), len };
    assert_eq!(chain.readable(), [segment(0x5000, 10)]);
    assert_eq!(chain.writable(), [segment(0x6000, 20), segment(0x7000, 30)]);
    assert_eq!((chain.readable_len(), chain.writable_len(), chain.head()), (10, 50, 0));
}

#[test]
fn a_chain_may_be_as_long_as_the_queue_and_no_longer() {
    let memory = ram();
    let mut entries: Vec<_> =
        (0..SIZE).map(|place| entry(0x5000, 1, flags::NEXT, (place + 1) % SIZE)).collect();
    put(&memory, TABLE, &entries);
    assert_eq!(parse(&memory, 3, false), Err(ChainFault::TooLong(SIZE)));
    entries[2].flags = 0;
    put(&memory, TABLE, &entries);
    assert_eq!(parse(&memory, 3, false).unwrap().readable().len(), usize::from(SIZE));
}

#[test]
fn an_indirect_table_may_be_longer_than_the_queue_but_not_its_chain() {
    let memory = ram();
    let table = |entries: u16| {
        let more = |place| if place + 1 < entries { flags::NEXT } else { 0 };
        let all: Vec<_> =
            (0..entries).map(|place| entry(0x5000, 1, more(place), place + 1)).collect();
        put(&memory, SECOND_TABLE, &all);
        put(&memory, TABLE, &[entry(SECOND_TABLE.0, 16 * 64, flags::INDIRECT, 0)]);
        parse(&memory, 0, true)
    };
    assert_eq!(table(SIZE).unwrap().readable_len(), u64::from(SIZE));
    assert_eq!(table(SIZE + 1), Err(ChainFault::TooLong(SIZE)));
}

#[test]
fn direct_descriptors_may_end_in_an_indirect_table() {
    let memory = ram();
    put(&memory, SECOND_TABLE, &[entry(0x6000, 2, flags::NEXT, 1), entry(0x7000, 3, 2, 0)]);
    let table = entry(SECOND_TABLE.0, 32, flags::INDIRECT, 0);
    put(&memory, TABLE, &[entry(0x5000, 1, flags::NEXT, 1), table]);
    let chain = parse(&memory, 0, true).unwrap();
    assert_eq!((chain.readable_len(), chain.writable_len()), (3, 3));
    assert_eq!(parse(&memory, 0, false), Err(ChainFault::Indirect(32)));
}

#[test]
fn exactly_what_ends_at_the_end_of_memory_is_accepted() {
    let memory = ram();
    let end = HIGH_RAM.0 + RAM_SIZE;
    let accepts = |address, len| {
        put(&memory, TABLE, &[entry(address, len, flags::WRITE, 0)]);
        parse(&memory, 0, false).is_ok()
    };
    assert!(accepts(end - 16, 16) && accepts(HOLE.0 - 1, 1) && accepts(HIGH_RAM.0, 1));
    assert!(!accepts(end - 16, 17) && !accepts(HOLE.0 - 1, 2) && !accepts(HIGH_RAM.0 - 1, 2));
    assert!(accepts(u64::MAX, 0), "an empty buffer is nowhere");
}

#[test]
fn a_table_that_wraps_around_is_refused() {
    let memory = ram();
    let table = GuestAddress(u64::MAX - 15);
    assert!(matches!(Chain::parse(&memory, table, 8, 0, true), Err(ChainFault::Table(_))));
    assert!(matches!(Chain::parse(&memory, table, 8, 1, true), Err(ChainFault::Table(_))));
}

#[test]
fn a_piece_of_nothing_is_the_end() {
    let memory = ram();
    let chain = chain_of(&memory, &[(0x5000, 4)], &[(0x6000, 4)]);
    assert_eq!(chain.reader(&memory).take_segment(0), None);
    let mut writer = chain.writer(&memory);
    assert_eq!(writer.take_segment(0), None);
    assert_eq!((writer.written(), writer.remaining()), (0, 4));
    assert_eq!(writer.write(&[]).unwrap(), 0);
    assert_eq!(chain.reader(&memory).read(&mut []).unwrap(), 0);
}

fn plausible() -> impl Strategy<Value = Entry> {
    let address = prop_oneof![
        6 => 0x10_0000_u64..0x20_0000,
        2 => Just(SECOND_TABLE.0),
        1 => prop::sample::select(vec![HOLE.0 - 8, HOLE.0, HIGH_RAM.0, u64::MAX - 7]),
        1 => any::<u64>(),
    ];
    let len = prop_oneof![
        4 => prop::sample::select(vec![0_u32, 1, 16, 32, 48, 4096]),
        1 => Just(RAM_SIZE as u32 - 0x20_0000),
        1 => any::<u32>(),
    ];
    let flags = prop_oneof![6 => 0_u16..4, 1 => 0_u16..8];
    (address, len, flags, 0..SIZE + 1).prop_map(|(address, len, flags, next)| {
        match flags & flags::INDIRECT != 0 {
            // The model knows this one table.
            true => entry(SECOND_TABLE.0, len % (16 * u32::from(SIZE) + 1), flags, next),
            false => entry(address, len, flags, next),
        }
    })
}

/// The specification, read slowly: what a chain is made of, or nothing if it is not a chain.
fn model(table: &[Entry], second: &[Entry], head: u16, indirect: bool) -> Option<Vec<Entry>> {
    let mut found = Vec::new();
    let mut current = table.to_vec();
    let mut place = head;
    let mut nested = false;
    loop {
        let entry = *current.get(usize::from(place))?;
        if entry.flags & flags::INDIRECT != 0 {
            let whole = entry.len > 0 && entry.len % 16 == 0;
            let entries = entry.len as usize / 16;
            if nested || !indirect || !whole || entry.flags & flags::NEXT != 0 {
                return None;
            }
            current = second[..entries].to_vec();
            (place, nested) = (0, true);
            continue;
        }
        found.push(entry);
        if found.len() > usize::from(SIZE) {
            return None;
        }
        if entry.flags & flags::NEXT == 0 {
            break;
        }
        place = entry.next;
    }
    let in_ram = |entry: &Entry| {
        let end = entry.address.checked_add(entry.len.into());
        entry.len == 0
            || end.is_some_and(|end| {
                RAM.iter().any(|ram| ram.contains(&entry.address) && end <= ram.end)
            })
    };
    let total: u64 = found.iter().map(|entry| u64::from(entry.len)).sum();
    let write = |entry: &Entry| entry.flags & flags::WRITE != 0;
    let ordered = found.is_sorted_by_key(write);
    (found.iter().all(in_ram) && ordered && total <= u32::MAX.into()).then_some(found)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn chains_are_accepted_exactly_as_the_specification_says(
        table in prop::collection::vec(plausible(), usize::from(SIZE)),
        second in prop::collection::vec(plausible(), usize::from(SIZE)),
        head in 0..SIZE + 1,
        indirect: bool,
    ) {
        let memory = ram();
        put(&memory, TABLE, &table);
        put(&memory, SECOND_TABLE, &second);
        let parsed = parse(&memory, head, indirect);
        let expected = model(&table, &second, head, indirect);
        match (parsed, expected) {
            (Ok(chain), Some(expected)) => {
                let segments = chain.readable().iter().chain(chain.writable());
                let found: Vec<_> = segments.map(|s| (s.address.0, s.len)).collect();
                let expected: Vec<_> = expected.iter().map(|e| (e.address, e.len)).collect();
                prop_assert_eq!(found, expected);
            }
            (Err(_), None) => {}
            (parsed, expected) => prop_assert!(false, "{parsed:?}, the model says {expected:?}"),
        }
    }

    #[test]
    fn whatever_is_in_memory_an_accepted_chain_is_inside_it(
        bytes in prop::collection::vec(any::<u8>(), 256),
        low_flags in prop::collection::vec(0_u8..8, 16),
        low_next in prop::collection::vec(0_u8..17, 16),
        table in prop_oneof![Just(0x1000_u64), Just(HOLE.0 - 64), any::<u64>()],
        head: u16,
        size in prop::sample::select(vec![0_u16, 1, 2, 16, 256, 32768]),
    ) {
        let mut bytes = bytes;
        for place in 0..16 {
            bytes[16 * place + 12..16 * place + 16].copy_from_slice(&[low_flags[place], 0, low_next[place], 0]);
        }
        let memory = ram();
        memory.write_slice(&bytes, GuestAddress(0x1000)).unwrap();
        memory.write_slice(&bytes[..64], GuestAddress(HOLE.0 - 64)).unwrap();
        let heads = [head, head % 16];
        for head in heads {
            if let Ok(chain) = Chain::parse(&memory, GuestAddress(table), size, head, true) {
                prop_assert!(chain.readable().len() + chain.writable().len() <= usize::from(size));
                for segment in chain.readable().iter().chain(chain.writable()) {
                    let end = segment.address.0.checked_add(segment.len.into());
                    let inside = RAM.iter().any(|ram| ram.contains(&segment.address.0) && end.unwrap() <= ram.end);
                    prop_assert!(segment.len == 0 || inside);
                }
            }
        }
    }

    #[test]
    fn reader_and_writer_see_one_stream_however_it_is_cut(
        lens in prop::collection::vec(0_u32..40, 1..12),
        chunks in prop::collection::vec(1_usize..50, 1..30),
    ) {
        let memory = ram();
        let mut address = 0x10_0000;
        let pieces: Vec<_> = lens.iter().map(|&len| { address += 100; (address, len) }).collect();
        let total: usize = lens.iter().map(|&len| len as usize).sum();
        let data: Vec<u8> = (0..total).map(|byte| byte as u8).collect();

        let chain = chain_of(&memory, &[], &pieces);
        let mut writer = chain.writer(&memory);
        let mut left = data.as_slice();
        for chunk in chunks.iter().cycle() {
            let chunk = left.split_off(..(*chunk).min(left.len())).unwrap();
            writer.write_all(chunk).unwrap();
            prop_assert_eq!(writer.remaining() as usize, left.len());
            if left.is_empty() {
                break;
            }
        }
        prop_assert_eq!(writer.written() as usize, total);
        prop_assert!(writer.write_all(&[0]).is_err());

        let chain = chain_of(&memory, &pieces, &[]);
        let mut back = Vec::new();
        chain.reader(&memory).read_to_end(&mut back).unwrap();
        prop_assert_eq!(&back, &data);
        let mut reader = chain.reader(&memory);
        let mut taken = Vec::new();
        let mut chunks = chunks.iter().cycle();
        while let Some(segment) = reader.take_segment(*chunks.next().unwrap()) {
            prop_assert!(segment.len > 0);
            let mut piece = vec![0; segment.len as usize];
            memory.read_slice(&mut piece, segment.address).unwrap();
            taken.extend(piece);
        }
        prop_assert_eq!(taken, data);
    }
}
