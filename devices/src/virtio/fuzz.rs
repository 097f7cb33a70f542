//! Mutated input for what all devices share: chains, registers of both transports, PCI, records.

use std::sync::{Arc, Mutex};

use ciborium::Value;

use super::block::request::{self, HEADER_SIZE, Limits};
use super::mmio::MmioTransport;
use super::pci::{PciTransport, VirtioFunction};
use super::{VirtioDevice, balloon, console, pmem, rng, vsock};
use crate::bus::{Bus, BusDevice};
use crate::executor::Executor;
use crate::ids::DeviceId;
use crate::irq::Interrupt;
use crate::memory::{GuestAddress, Memory};
use crate::pci::msix::Msix;
use crate::pci::root::{EcamAccess, PciRoot, PortAccess};
use crate::snapshot::{Record, Stateful};
use crate::testing::{FuzzRing, StubDesk, fuzz};

#[test]
fn fuzz_chain() {
    let ring = FuzzRing::new();
    fuzz("chain", &FuzzRing::seeds(&[7; 100]), |input| {
        let Some(chain) = ring.chain(input) else { return (99, 0) };
        let pieces = chain.readable().iter().chain(chain.writable());
        for piece in pieces.clone().filter(|piece| piece.len > 0) {
            let inside = vm_memory::GuestMemoryBackend::check_range(
                ring.memory(),
                piece.address,
                piece.len as usize,
            );
            assert!(inside, "{piece:?}");
        }
        assert!(pieces.count() <= 8);
        assert!(chain.readable_len() + chain.writable_len() <= u64::from(u32::MAX));
        (chain.readable().len(), chain.writable().len())
    });
}

#[test]
fn fuzz_block_request() {
    let limits = Limits { sectors: 1000, read_only: false };
    let seed = |kind: u32, sector: u64, ranges: &[u32]| {
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend([0; 4]);
        bytes.extend(sector.to_le_bytes());
        ranges.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        bytes
    };
    let corpus = [
        seed(0, 5, &[]),
        seed(1, 5, &[512 / 4; 128]),
        seed(4, 0, &[]),
        seed(8, 0, &[]),
        seed(11, 0, &[9, 0, 7, 0]),
        seed(13, 0, &[9, 0, 7, 1, 100, 0, 900, 1]),
    ];
    fuzz("block request", &corpus, |input| {
        let Some((header, data)) = input.split_first_chunk::<HEADER_SIZE>() else { return (9, 9) };
        let last = u64::from(data.last().copied().unwrap_or(0)) * 256;
        let inside = |extent: super::block::Extent| {
            let end = extent.offset.checked_add(extent.len).unwrap();
            assert!(end <= limits.sectors * 512 && extent.len.is_multiple_of(512));
        };
        match request::parse(*header, data.len() as u64, last, limits) {
            Ok(request::Command::Read(extent) | request::Command::Write(extent)) => {
                inside(extent);
                (1, 0)
            }
            Ok(command @ (request::Command::Discard | request::Command::WriteZeroes)) => {
                match request::ranges(data, command, limits) {
                    Ok(ranges) => {
                        ranges.extents.iter().for_each(|extent| inside(*extent));
                        (2, ranges.extents.len())
                    }
                    Err(status) => (3, status as usize),
                }
            }
            Ok(_) => (4, 0),
            Err(status) => (5, status as usize),
        }
    });
}

/// Accesses of an input, as the bus passes them on: 1 byte says how, 2 where in the window of so many
/// bytes, then what is written.
fn accesses(input: &[u8], device: &mut dyn BusDevice, window: u64) -> u64 {
    let mut outcome = 0;
    let mut rest = input;
    while let Some(([how, low, high], after)) = rest.split_first_chunk() {
        let size = 1 << (how & 3);
        // In words, where the window is large.
        let place = u64::from(u16::from_le_bytes([*low, *high])) << (window >> 18).min(2);
        let aligned = if how & 4 == 0 { place & !(size as u64 - 1) } else { place };
        let offset = aligned % (window - size as u64 + 1);
        let mut data = [0; 8];
        let given = after.len().min(size);
        data[..given].copy_from_slice(&after[..given]);
        rest = &after[given..];
        let done = if how & 8 == 0 {
            device.write(offset, &data[..size]).is_ok()
        } else {
            device.read(offset, &mut data[..size]).is_ok()
        };
        outcome = (outcome << 1 | u64::from(done)) & 0xff;
    }
    outcome
}

/// Writes that bring a device up to DRIVER_OK: offset and value, with the width of `how`.
fn script(writes: &[(u8, u16, u32)]) -> Vec<u8> {
    let one = |&(how, at, value): &(u8, u16, u32)| {
        let [low, high] = at.to_le_bytes();
        let bytes = value.to_le_bytes();
        [&[how, low, high][..], &bytes[..1 << (how & 3)]].concat()
    };
    writes.iter().flat_map(one).collect()
}

fn small_memory() -> Memory {
    Memory::from_ranges(&[(GuestAddress(0), 0x1_0000), (GuestAddress(0x2_0000), 0x1_0000)]).unwrap()
}

#[test]
fn fuzz_mmio_registers() {
    let steps = [(2, 0x70, 1), (2, 0x70, 3), (2, 0x24, 1), (2, 0x20, 1), (2, 0x70, 11)];
    let queue = [(2, 0x30, 0), (2, 0x38, 16), (2, 0x80, 0x1000), (2, 0x90, 0x2000)];
    let start = [(2, 0xa0, 0x3000), (2, 0x44, 1), (2, 0x70, 15), (2, 0x50, 0), (2, 0x70, 0)];
    let corpus = [script(&steps), script(&[&steps[..], &queue, &start].concat())];
    let (memory, line) = (small_memory(), Interrupt::none());
    let desk = StubDesk::new();
    let mut device =
        MmioTransport::new(DeviceId::new("stub"), desk.device(), memory, &line).unwrap();
    fuzz("mmio registers", &corpus, |input| {
        let outcome = accesses(input, &mut device, 0x1000);
        let status = device.lifecycle().status();
        desk.calls();
        device.write(0x70, &[0; 4]).unwrap();
        assert_eq!(device.lifecycle().status(), 0);
        (outcome, status)
    });
}

#[test]
fn fuzz_pci_window() {
    let steps = [(0, 0x14, 1), (0, 0x14, 3), (2, 0x08, 1), (2, 0x0c, 1), (0, 0x14, 11)];
    let queue = [(1, 0x16, 0), (1, 0x18, 16), (1, 0x1a, 1), (2, 0x20, 0x1000), (2, 0x28, 0x2000)];
    let start = [(2, 0x30, 0x3000), (1, 0x1c, 1), (0, 0x14, 15), (1, 0x6000, 0), (2, 0x8000, 9)];
    let corpus = [script(&steps), script(&[&steps[..], &queue, &start].concat())];
    let desk = StubDesk::new();
    let sink = Arc::new(|_| {});
    let mut device =
        PciTransport::new(DeviceId::new("stub"), desk.device(), small_memory(), sink).unwrap();
    fuzz("pci window", &corpus, |input| {
        let outcome = accesses(input, &mut device, 0x1_0000);
        let status = device.lifecycle().status();
        desk.calls();
        device.write(0x14, &[0]).unwrap();
        (outcome, status)
    });
}

#[test]
fn fuzz_pci_config() {
    let bus = Arc::new(Bus::new());
    let root = Arc::new(Mutex::new(PciRoot::new(&bus, Box::new(|_| {}))));
    for name in ["a", "b"] {
        let (id, sink) = (DeviceId::new(name), Arc::new(|_| {}));
        let device = StubDesk::new().device();
        let transport = PciTransport::new(id.clone(), device, small_memory(), sink).unwrap();
        let function = VirtioFunction::new(Arc::new(Mutex::new(transport)), 0xc000_0000);
        root.lock().unwrap().insert(id, Box::new(function)).unwrap();
    }
    let mut ports = PortAccess::new(root.clone());
    let mut ecam = EcamAccess::new(root);
    let ecam_seed = [(1, 0x2001, 6), (2, 0x2004, 0x9000_0000), (1, 0x4001, 6), (2, 0x2004, !0)];
    let port_seed = [(2, 0, 0x8000_0804), (1, 4, 6), (2, 0, 0x8000_0810), (2, 4, 0x9000_0000)];
    let corpus = [script(&ecam_seed), script(&port_seed)];
    fuzz("pci config", &corpus, |input| match input.split_first() {
        Some((first, rest)) if first & 16 != 0 => accesses(rest, &mut ports, 8),
        _ => accesses(input, &mut ecam, 1 << 20) | 256,
    });
}

/// Table and pending bits as a device of the bus.
struct Vectors(Msix);

impl BusDevice for Vectors {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), crate::bus::AccessError> {
        match offset.checked_sub(0x4000) {
            None => self.0.read_table(offset, data),
            Some(offset) => self.0.read_pending(offset, data),
        }
    }
    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), crate::bus::AccessError> {
        match offset.checked_sub(0x4000) {
            None => self.0.write_table(offset, data),
            Some(offset) => {
                self.0.set_control(u16::from(data[0]) << 8);
                self.0.raise(offset as u16);
                Ok(())
            }
        }
    }
}

#[test]
fn fuzz_msix() {
    let mut vectors = Vectors(Msix::new(3, Arc::new(|_| {})));
    let seed = [(2, 0, 0xfee0_0000), (2, 8, 0x30), (2, 12, 0), (0, 0x4000, 0x80), (2, 12, 1)];
    fuzz("msix", &[script(&seed)], |input| {
        let outcome = accesses(input, &mut vectors, 0x8000);
        let record = vectors.0.record();
        assert!(vectors.0.fits(&record));
        outcome
    });
}

/// Devices and the transports in front of them, as they are restored.
fn subjects(executor: &Executor) -> Vec<(&'static str, Box<dyn VirtioDevice>)> {
    let handle = || executor.handle();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), [0; 4096]).unwrap();
    let disk = super::block::RawFile::open(file.path(), true).unwrap();
    let config =
        super::block::BlockConfig { read_only: true, ..super::block::BlockConfig::new("disk") };
    let backing = pmem::PmemBacking::open(file.path(), true).unwrap();
    let place = pmem::PmemConfig { start: GuestAddress(1 << 32) };
    let console = console::Console::new(handle(), <_>::default(), <_>::default()).0;
    vec![
        ("rng", Box::new(rng::Rng::new(handle(), rng::host_entropy))),
        ("block", Box::new(super::block::Block::new(handle(), Box::new(disk), config).unwrap())),
        ("vsock", Box::new(vsock::Vsock::new(handle(), <_>::default()).unwrap().0)),
        ("balloon", Box::new(balloon::Balloon::new(handle(), <_>::default()).0)),
        ("pmem", Box::new(pmem::Pmem::new(handle(), backing, place).unwrap())),
        ("console", Box::new(console)),
    ]
}

/// Bytes of a record, and the record that mutated bytes are, if they are one.
fn encoded(record: &Record) -> Vec<u8> {
    let mut bytes = Vec::new();
    ciborium::into_writer(record, &mut bytes).unwrap();
    bytes
}

#[test]
fn fuzz_device_records() {
    let executor = Executor::spawn("records").unwrap();
    let mut devices = subjects(&executor);
    let corpus: Vec<_> =
        devices.iter().map(|(_, device)| encoded(&device.save_record().unwrap())).collect();
    let before: Vec<_> = devices.iter().map(|(_, device)| device.save_record().unwrap()).collect();
    fuzz("device records", &corpus, |input| {
        let Ok(record) = ciborium::from_reader::<Record, _>(input) else { return (0, 0) };
        let mut taken = 0;
        for ((_, device), before) in devices.iter_mut().zip(&before) {
            if device.restore_record(record.clone()).is_ok() {
                taken += 1;
                device.save_record().unwrap();
                device.restore_record(before.clone()).unwrap();
            }
        }
        (1 + record.version.min(4), taken)
    });
}

#[test]
fn fuzz_transport_records() {
    let (memory, line, sink) = (small_memory(), Interrupt::none(), Arc::new(|_| {}));
    let id = || DeviceId::new("stub");
    let device = || StubDesk::new().device();
    let mut mmio = MmioTransport::new(id(), device(), memory.clone(), &line).unwrap();
    let mut pci = PciTransport::new(id(), device(), memory, sink).unwrap();
    let (first, second) = (mmio.save_record().unwrap(), pci.save_record().unwrap());
    let corpus = [encoded(&first), encoded(&second)];
    fuzz("transport records", &corpus, |input| {
        let Ok(record) = ciborium::from_reader::<Record, _>(input) else { return 0 };
        let mut outcome = 1 + u8::from(matches!(record.state, Value::Map(_)));
        if mmio.restore_record(record.clone()).is_ok() {
            mmio.save_record().unwrap();
            mmio.restore_record(first.clone()).unwrap();
            outcome |= 4;
        }
        if pci.restore_record(record).is_ok() {
            pci.save_record().unwrap();
            pci.restore_record(second.clone()).unwrap();
            outcome |= 8;
        }
        outcome
    });
}
