//! A loop of mutated input for parsers, without a compiler's help: an input whose outcome is of a
//! class that was not seen before is kept and mutated further.
//!
//! A few thousand executions by default, so that every run of the tests has some; `CUBE_FUZZ` says
//! how many instead, and `CUBE_FUZZ_SEED` where the random numbers start. What a parser panics on is
//! printed.

use std::collections::HashSet;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::time::Instant;

use virtio_queue::{Queue, QueueT};

use crate::event::Event;
use crate::ids::QueueIndex;
use crate::irq::Interrupt;
use crate::memory::{Bytes, GuestAddress, Memory};
use crate::virtio::feature;
use crate::virtio::queue::QueueLines;
use crate::virtio::{ActiveQueue, Chain};

/// Executions by default.
const FEW: u64 = 3_000;
/// Inputs that are kept at most.
const KEPT: usize = 512;
/// Bytes of an input at most.
const LONGEST: usize = 2048;
/// Where the random numbers start by default.
const SEED: u64 = 0x5eed;

/// Random numbers (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }
}

/// Numbers at which parsers go wrong.
const EDGES: [u64; 14] = [
    0,
    1,
    2,
    15,
    16,
    17,
    0x7f,
    0xff,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    0x7fff_ffff_ffff_ffff,
    u64::MAX,
];

/// Says on what input and seed a run ended that did not end well.
struct Witness<'a> {
    name: &'a str,
    seed: u64,
    count: u64,
    input: Vec<u8>,
}

impl Drop for Witness<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Self { name, seed, count, input } = self;
            eprintln!("{name}: seed {seed:#x}, execution {count}, input {input:02x?}");
        }
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().unwrap())
}

/// Gives mutations of `corpus` to `run`, which panics at what must not be and answers with the class
/// of what came of the input, of which there should be some hundreds at most.
pub fn fuzz<T: Hash>(name: &str, corpus: &[Vec<u8>], mut run: impl FnMut(&[u8]) -> T) {
    let wanted = number("CUBE_FUZZ");
    let seed = number("CUBE_FUZZ_SEED").unwrap_or(SEED);
    let mut random = Random(seed);
    let mut kept: Vec<Vec<u8>> = corpus.to_vec();
    kept.push(Vec::new());
    let mut classes = HashSet::new();
    let mut witness = Witness { name, seed, count: 0, input: Vec::new() };
    let start = Instant::now();
    for count in 0..wanted.unwrap_or(FEW) {
        let first = kept.get(count as usize).cloned();
        witness.input = first.unwrap_or_else(|| mutated(&kept, &mut random));
        witness.count = count;
        let mut hasher = DefaultHasher::new();
        run(&witness.input).hash(&mut hasher);
        if kept.len() < KEPT && classes.insert(hasher.finish()) {
            kept.push(witness.input.clone());
        }
    }
    if let Some(wanted) = wanted {
        let seconds = start.elapsed().as_secs_f64();
        println!("{name}: {wanted} executions in {seconds:.1} s, {} classes", classes.len());
    }
}

fn mutated(kept: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    let mut input = kept[random.below(kept.len())].clone();
    for _ in 0..=random.below(4) {
        mutate(&mut input, kept, random);
    }
    input.truncate(LONGEST);
    input
}

fn mutate(input: &mut Vec<u8>, kept: &[Vec<u8>], random: &mut Random) {
    let (len, at) = (input.len(), random.below(input.len()));
    match random.below(8) {
        0 if len > 0 => input[at] ^= 1 << random.below(8),
        1 if len > 0 => input[at] = random.next() as u8,
        2 | 3 => {
            // An edge, or one off it, over 1, 2, 4 or 8 bytes.
            let edge = EDGES[random.below(EDGES.len())].wrapping_add(random.below(3) as u64);
            let bytes = edge.wrapping_sub(1).to_le_bytes();
            let width = 1 << random.below(4);
            for (to, from) in input.iter_mut().skip(at).zip(bytes.iter().take(width)) {
                *to = *from;
            }
        }
        4 => input.insert(at, random.next() as u8),
        5 if len > 0 => {
            input.remove(at);
        }
        6 => input.truncate(at),
        _ => {
            // The rest of another one.
            let other = &kept[random.below(kept.len())];
            input.truncate(at);
            input.extend(other.iter().skip(random.below(other.len())));
        }
    }
}

/// A queue in a small memory, into which inputs are put as chains.
pub struct FuzzRing {
    memory: Memory,
}

const TABLE: u64 = 0x1000;
const AVAIL: u64 = 0x2000;
const USED: u64 = 0x3000;
const BUFFER: u64 = 0x4000;
/// Bytes of the memory, with another such piece behind a hole of the same size.
const SMALL: usize = 0x8000;
const ENTRIES: u16 = 8;
/// Bytes of the table: the first part of an input.
const TABLE_LEN: usize = 16 * ENTRIES as usize;

impl Default for FuzzRing {
    fn default() -> Self {
        Self::new()
    }
}

impl FuzzRing {
    /// Without a chain.
    pub fn new() -> Self {
        let ranges = [(GuestAddress(0), SMALL), (GuestAddress(2 * SMALL as u64), SMALL)];
        Self { memory: Memory::from_ranges(&ranges).unwrap() }
    }

    /// Guest RAM.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The queue, for a device to work on. To be called once.
    pub fn queue(&self, index: u16) -> ActiveQueue {
        let mut queue = Queue::new(ENTRIES).unwrap();
        queue.try_set_desc_table_address(GuestAddress(TABLE)).unwrap();
        queue.try_set_avail_ring_address(GuestAddress(AVAIL)).unwrap();
        queue.try_set_used_ring_address(GuestAddress(USED)).unwrap();
        queue.set_ready(true);
        let lines = QueueLines { kick: Event::new().unwrap(), interrupt: Interrupt::none() };
        let features = feature::COMMON;
        ActiveQueue::new(QueueIndex(index), queue, self.memory.clone(), lines, features).unwrap()
    }

    fn place(&self, input: &[u8]) {
        let (table, data) = input.split_at(input.len().min(TABLE_LEN));
        self.memory.write_slice(&[0; TABLE_LEN], GuestAddress(TABLE)).unwrap();
        self.memory.write_slice(table, GuestAddress(TABLE)).unwrap();
        self.memory.write_slice(data, GuestAddress(BUFFER)).unwrap();
    }

    /// The chain that the input is, if it is one: a table of eight descriptors, then what is at
    /// the start of the buffers of [`FuzzRing::seeds`].
    pub fn chain(&self, input: &[u8]) -> Option<Chain> {
        self.place(input);
        Chain::parse(&self.memory, GuestAddress(TABLE), ENTRIES, 0, true).ok()
    }

    /// Makes that chain available on `queue`, whatever became of the last ones: an answer may have
    /// been written over the rings.
    pub fn offer(&self, queue: &ActiveQueue, input: &[u8]) {
        self.place(input);
        let next = queue.record().next_avail;
        let slot = AVAIL + 4 + 2 * u64::from(next % ENTRIES);
        self.memory.write_obj(0_u16, GuestAddress(slot)).unwrap();
        self.memory.write_obj(next.wrapping_add(1), GuestAddress(AVAIL + 2)).unwrap();
    }

    /// Well-formed inputs with `data`: in one piece, in two, with room for an answer, in a table.
    pub fn seeds(data: &[u8]) -> Vec<Vec<u8>> {
        let entry = |address: u64, len: u32, flags: u16, next: u16| {
            let mut bytes = address.to_le_bytes().to_vec();
            bytes.extend(len.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
            bytes.extend(next.to_le_bytes());
            bytes
        };
        let len = data.len() as u32;
        let (half, room) = (len / 2, BUFFER + 0x1000);
        let tables: [Vec<Vec<u8>>; 4] = [
            vec![entry(BUFFER, len, 0, 0)],
            vec![
                entry(BUFFER, half, 1, 1),
                entry(BUFFER + u64::from(half), len - half, 1, 2),
                entry(room, 64, 3, 3),
                entry(room + 64, 1, 2, 0),
            ],
            vec![entry(BUFFER, len, 1, 1), entry(room, 512, 2, 0)],
            vec![
                entry(TABLE + 16, 48, 4, 0),
                entry(BUFFER, len, 1, 1),
                entry(room, 16, 3, 2),
                entry(room + 16, 4, 2, 0),
            ],
        ];
        let padded = tables.into_iter().map(|table| {
            let mut bytes = table.concat();
            bytes.resize(TABLE_LEN, 0);
            bytes.extend(data);
            bytes
        });
        padded.collect()
    }
}
