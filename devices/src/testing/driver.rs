//! A driver without a guest: it does with registers and rings what Linux does, and what it never
//! would.

mod face;
mod parts;

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering;

use self::face::Face;
pub use self::face::Kind;
pub(super) use self::face::{mmio, pci};
use self::parts::descriptor;
pub use self::parts::{Buffer, Descriptor, Used, flags, register};
use super::{IrqLog, PATIENCE, eventually, ram};
use crate::bus::AccessError;
use crate::memory::{Bytes, GuestAddress, Memory};
use crate::pci::PciFunction;
use crate::snapshot::{Record, RestoreError, SaveError};
use crate::virtio::VirtioDevice;
use crate::virtio::feature;
use crate::virtio::lifecycle::{Lifecycle, status};
use crate::virtio::mmio::{MmioTransport, QUEUE_NOTIFY};

/// One queue as the driver sees it.
struct Ring {
    size: u16,
    free: VecDeque<u16>,
    chains: HashMap<u16, Vec<u16>>,
    avail: u16,
    used: u16,
}

impl Ring {
    fn new(size: u16) -> Self {
        Self { size, free: (0..size).collect(), chains: HashMap::new(), avail: 0, used: 0 }
    }
}

const RINGS: u64 = 0x10_0000;
const RING_STRIDE: u64 = 0x1_0000;
const AVAIL_OFFSET: u64 = 0x8000;
const USED_OFFSET: u64 = 0xc000;
/// Queues have at most this many entries, for their rings to fit into the stride.
const MAX_QUEUE_SIZE: u16 = 1024;
const HEAP: u64 = 0x40_0000;
const HEAP_END: u64 = 0x80_0000;

/// A driver, the transport it drives and the memory that both see.
pub struct GuestDriver {
    memory: Memory,
    face: Face,
    irq: IrqLog,
    rings: Vec<Ring>,
    heap: u64,
    event_idx: bool,
}

impl GuestDriver {
    /// A driver for `device` in the memory of [`ram`], which has touched nothing yet.
    pub fn new(device: Box<dyn VirtioDevice>) -> Self {
        Self::with_memory(device, ram())
    }

    /// The same in other memory, which must have RAM from 1 to 8 MiB.
    pub fn with_memory(device: Box<dyn VirtioDevice>, memory: Memory) -> Self {
        Self::over(Kind::Mmio, device, memory)
    }

    /// The same over either transport.
    pub fn over(kind: Kind, device: Box<dyn VirtioDevice>, memory: Memory) -> Self {
        let irq = IrqLog::new();
        let face = Face::new(kind, device, &memory, &irq);
        Self { memory, face, irq, rings: Vec::new(), heap: HEAP, event_idx: false }
    }

    // --- registers ---

    /// A register, by its MMIO offset on both transports.
    pub fn read(&mut self, offset: u64) -> u32 {
        self.face.read(offset).unwrap()
    }

    /// Writes a register; the bus would swallow a refusal.
    pub fn write(&mut self, offset: u64, value: u32) -> Result<(), AccessError> {
        self.face.write(offset, value)
    }

    /// Which transport this is.
    pub fn kind(&self) -> Kind {
        self.face.kind()
    }

    /// The MMIO transport, for accesses of other sizes. Panics over PCI.
    pub fn transport(&mut self) -> &mut MmioTransport {
        match &mut self.face {
            Face::Mmio(transport) => transport,
            Face::Pci(_) => panic!("this driver drives PCI"),
        }
    }

    /// The device's life.
    pub fn lifecycle<R>(&mut self, act: impl FnOnce(&mut Lifecycle) -> R) -> R {
        self.face.with(act)
    }

    /// Bytes of the window that the registers are in.
    pub fn window(&self) -> u64 {
        self.face.window()
    }

    /// Any access to that window, of any size.
    pub fn window_read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        self.face.window_read(offset, data)
    }

    /// Any access to that window, of any size.
    pub fn window_write(&mut self, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        self.face.window_write(offset, data)
    }

    /// The function's configuration registers. Panics over MMIO.
    pub fn function(&mut self) -> &mut dyn PciFunction {
        self.face.function().expect("this driver drives MMIO")
    }

    /// The device status.
    pub fn status(&mut self) -> u8 {
        self.read(register::STATUS) as u8
    }

    /// True if the device has asked for a reset.
    pub fn needs_reset(&mut self) -> bool {
        self.status() & status::NEEDS_RESET != 0
    }

    /// What the device offers.
    pub fn offered(&mut self) -> u64 {
        let mut features = 0;
        for word in 0..2 {
            self.write(register::DEVICE_FEATURES_SELECT, word).unwrap();
            features |= u64::from(self.read(register::DEVICE_FEATURES)) << (32 * word);
        }
        features
    }

    /// Reads a piece of the configuration space.
    pub fn config(&mut self, offset: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.read_config(offset, &mut data).unwrap();
        data
    }

    /// Any read of the configuration space.
    pub fn read_config(&mut self, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        let start = self.face.config();
        self.face.window_read(start.saturating_add(offset), data)
    }

    /// Any write to the configuration space.
    pub fn write_config(&mut self, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        let start = self.face.config();
        self.face.window_write(start.saturating_add(offset), data)
    }

    /// Number of queues of the device.
    pub fn queue_count(&mut self) -> u16 {
        self.lifecycle(|life| life.identity().queue_sizes.len()) as u16
    }

    /// Entries of queue `index`.
    pub fn queue_size(&mut self, index: u16) -> u16 {
        self.lifecycle(|life| life.queue_size(index))
    }

    /// What was agreed on.
    pub fn accepted(&mut self) -> u64 {
        self.lifecycle(|life| {
            u64::from(life.accepted_features(0)) | u64::from(life.accepted_features(1)) << 32
        })
    }

    // --- set-up ---

    /// From reset, or a failed attempt, to FEATURES_OK with exactly `features`; false if the device does not agree.
    pub fn negotiate(&mut self, features: u64) -> bool {
        for bit in [status::ACKNOWLEDGE, status::DRIVER] {
            let bits = self.status() | bit;
            self.write(register::STATUS, bits.into()).unwrap();
        }
        for word in 0..2 {
            self.write(register::DRIVER_FEATURES_SELECT, word).unwrap();
            self.write(register::DRIVER_FEATURES, (features >> (32 * word)) as u32).unwrap();
        }
        let wanted = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK;
        self.write(register::STATUS, wanted.into()).unwrap();
        self.event_idx = features & feature::RING_EVENT_IDX != 0;
        self.status() == wanted
    }

    /// Writes the addresses of queue `index`'s rings, without making it ready.
    pub fn set_rings(&mut self, index: u16, addresses: [u64; 3]) -> Result<(), AccessError> {
        self.write(register::QUEUE_SELECT, index.into())?;
        let registers = [register::QUEUE_DESC, register::QUEUE_AVAIL, register::QUEUE_USED];
        for (register, address) in registers.into_iter().zip(addresses) {
            self.write(register, address as u32)?;
            self.write(register + 4, (address >> 32) as u32)?;
        }
        Ok(())
    }

    /// Where the rings of queue `index` are: descriptors, available, used.
    pub fn ring_addresses(index: u16) -> [u64; 3] {
        let base = RINGS + u64::from(index) * RING_STRIDE;
        [base, base + AVAIL_OFFSET, base + USED_OFFSET]
    }

    /// Sets up all queues at their largest size and makes them ready.
    pub fn set_up_queues(&mut self) {
        let count = self.queue_count();
        self.rings.clear();
        for index in 0..count {
            self.write(register::QUEUE_SELECT, index.into()).unwrap();
            let size = self.read(register::QUEUE_SIZE_MAX) as u16;
            let size = size.min(MAX_QUEUE_SIZE);
            self.write(register::QUEUE_SIZE, size.into()).unwrap();
            let rings = Self::ring_addresses(index);
            let zeroes = vec![0; RING_STRIDE as usize];
            self.memory.write_slice(&zeroes, GuestAddress(rings[0])).unwrap();
            self.set_rings(index, rings).unwrap();
            self.write(register::QUEUE_READY, 1).unwrap();
            self.rings.push(Ring::new(size));
        }
    }

    /// DRIVER_OK.
    pub fn driver_ok(&mut self) {
        let bits = u32::from(self.status()) | u32::from(status::DRIVER_OK);
        self.write(register::STATUS, bits).unwrap();
    }

    /// From reset to DRIVER_OK, with all that the device offers.
    pub fn initialize(&mut self) {
        self.initialize_without(0);
    }

    /// The same, less the bits of `unwanted`.
    pub fn initialize_without(&mut self, unwanted: u64) {
        let features = self.offered() & !unwanted;
        assert!(self.negotiate(features), "features {features:#x} were refused");
        self.set_up_queues();
        self.driver_ok();
        assert!(!self.needs_reset(), "the device did not start");
    }

    /// Resets the device and forgets all chains.
    pub fn reset(&mut self) {
        self.write(register::STATUS, 0).unwrap();
        assert_eq!(self.status(), 0);
        self.rings.clear();
        self.heap = HEAP;
    }

    // --- memory ---

    /// Guest RAM.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// A new buffer of `len` bytes, zeroed. All are given back by a reset.
    pub fn alloc(&mut self, len: usize) -> GuestAddress {
        let start = GuestAddress(self.heap);
        self.heap += (len as u64).next_multiple_of(64);
        assert!(self.heap <= HEAP_END, "the driver's heap is full");
        self.memory.write_slice(&vec![0; len], start).unwrap();
        start
    }

    /// A new buffer with `data` in it.
    pub fn alloc_with(&mut self, data: &[u8]) -> GuestAddress {
        let start = self.alloc(data.len());
        self.memory.write_slice(data, start).unwrap();
        start
    }

    /// `len` bytes of guest RAM.
    pub fn bytes(&self, address: GuestAddress, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.memory.read_slice(&mut data, address).unwrap();
        data
    }

    // --- rings ---

    /// Puts `descriptor` into place `place` of queue `index`'s table.
    pub fn put_descriptor(&mut self, index: u16, place: u16, descriptor: Descriptor) {
        let table = Self::ring_addresses(index)[0];
        self.put_entry(GuestAddress(table), place, descriptor);
    }

    /// Puts `descriptor` into place `place` of the table at `table`.
    pub fn put_entry(&mut self, table: GuestAddress, place: u16, descriptor: Descriptor) {
        let address = GuestAddress(table.0 + 16 * u64::from(place));
        self.memory.write_slice(&descriptor.bytes(), address).unwrap();
    }

    /// Makes `head` available, whatever it may be the head of.
    pub fn publish(&mut self, index: u16, head: u16) {
        let ring = &mut self.rings[usize::from(index)];
        let entry = 4 + 2 * u64::from(ring.avail % ring.size);
        ring.avail = ring.avail.wrapping_add(1);
        let (avail, value) = (Self::ring_addresses(index)[1], ring.avail);
        self.memory.write_obj(head.to_le(), GuestAddress(avail + entry)).unwrap();
        self.set_avail_index(index, value);
    }

    /// Sets the index of the available ring to `value`.
    pub fn set_avail_index(&mut self, index: u16, value: u16) {
        let address = GuestAddress(Self::ring_addresses(index)[1] + 2);
        self.memory.store(value.to_le(), address, Ordering::Release).unwrap();
    }

    /// Makes a chain of `buffers` available; its head.
    pub fn add(&mut self, index: u16, buffers: &[Buffer]) -> u16 {
        let ring = &mut self.rings[usize::from(index)];
        assert!(buffers.len() <= ring.free.len(), "the queue is full");
        let places: Vec<u16> = ring.free.drain(..buffers.len()).collect();
        let head = places[0];
        ring.chains.insert(head, places.clone());
        for (position, buffer) in buffers.iter().enumerate() {
            let next = places.get(position + 1).copied();
            self.put_descriptor(index, places[position], descriptor(buffer, next));
        }
        self.publish(index, head);
        head
    }

    /// Makes a chain of `buffers` in an indirect table available; its head.
    pub fn add_indirect(&mut self, index: u16, buffers: &[Buffer]) -> u16 {
        let table = self.alloc(16 * buffers.len());
        for (position, buffer) in buffers.iter().enumerate() {
            let next = (position + 1 < buffers.len()).then_some(position as u16 + 1);
            self.put_entry(table, position as u16, descriptor(buffer, next));
        }
        let ring = &mut self.rings[usize::from(index)];
        let head = ring.free.pop_front().expect("the queue is full");
        ring.chains.insert(head, vec![head]);
        let (address, len) = (table.0, 16 * buffers.len() as u32);
        let entry = Descriptor { address, len, flags: flags::INDIRECT, next: 0 };
        self.put_descriptor(index, head, entry);
        self.publish(index, head);
        head
    }

    /// Rings the doorbell of queue `index`, as KVM does.
    pub fn kick(&mut self, index: u16) {
        self.face.doorbell(index).signal();
    }

    /// Notifies by the register, as without KVM's doorbells. Any index.
    pub fn notify(&mut self, index: u32) {
        self.write(QUEUE_NOTIFY, index).unwrap();
    }

    /// Index of the used ring: chains that the device has given back since its reset, modulo 2^16.
    pub fn used_index(&self, index: u16) -> u16 {
        let address = GuestAddress(Self::ring_addresses(index)[2] + 2);
        u16::from_le(self.memory.load(address, Ordering::Acquire).unwrap())
    }

    /// The next chain that the device has given back, if there is one.
    pub fn used(&mut self, index: u16) -> Option<Used> {
        let current = self.used_index(index);
        let ring = &mut self.rings[usize::from(index)];
        if ring.used == current {
            return None;
        }
        let [_, avail, used] = Self::ring_addresses(index);
        let entry = GuestAddress(used + 4 + 8 * u64::from(ring.used % ring.size));
        let entry: [u32; 2] = [
            self.memory.read_obj(entry).unwrap(),
            self.memory.read_obj(GuestAddress(entry.0 + 4)).unwrap(),
        ];
        let (head, len) = (entry[0].try_into().unwrap(), entry[1]);
        ring.free.extend(ring.chains.remove(&head).unwrap_or_default());
        ring.used = ring.used.wrapping_add(1);
        if self.event_idx {
            // Interrupt with the next chain (virtio 1.3, section 2.7.10).
            let event = GuestAddress(avail + 4 + 2 * u64::from(ring.size));
            self.memory.store(ring.used.to_le(), event, Ordering::Release).unwrap();
        }
        Some(Used { head, len })
    }

    /// Waits for the next chain that the device gives back.
    pub fn wait_used(&mut self, index: u16) -> Used {
        let mut used = None;
        let came = eventually(PATIENCE, || {
            used = self.used(index);
            used.is_some()
        });
        assert!(came, "queue {index}: no answer, status {:#x}", self.status());
        used.unwrap()
    }

    /// Sends a chain and waits for its answer; the length that the device reports.
    pub fn exchange(&mut self, index: u16, buffers: &[Buffer]) -> u32 {
        let head = self.add(index, buffers);
        self.kick(index);
        let used = self.wait_used(index);
        assert_eq!(used.head, head, "another chain was given back");
        used.len
    }

    // --- life ---

    /// Interrupts so far.
    pub fn irq(&self) -> &IrqLog {
        &self.irq
    }

    /// Waits for an interrupt with `bits` in its status, and acknowledges these.
    pub fn wait_interrupt(&mut self, bits: u32) {
        let came = eventually(PATIENCE, || self.read(register::INTERRUPT_STATUS) & bits == bits);
        assert!(came, "no interrupt {bits:#x}");
        self.write(register::INTERRUPT_ACK, bits).unwrap();
    }

    /// Stops the device, as for a pause of the VM.
    pub fn pause(&mut self) {
        self.lifecycle(Lifecycle::pause);
    }

    /// Lets it go on.
    pub fn resume(&mut self) {
        self.lifecycle(Lifecycle::resume);
    }

    /// The transport's record. Only while paused or before DRIVER_OK.
    pub fn save(&self) -> Record {
        self.try_save().unwrap()
    }

    /// The transport's record, if it can be had now.
    pub fn try_save(&self) -> Result<Record, SaveError> {
        self.face.save()
    }

    /// Puts `device`, restored from `record`, in the place of the old one, on the same memory. A
    /// device that takes the record is not resumed yet; one that does not leaves the old in place.
    pub fn replace(
        &mut self,
        device: Box<dyn VirtioDevice>,
        record: Record,
    ) -> Result<(), RestoreError> {
        self.face = self.face.restored(device, record, &self.memory, &self.irq)?;
        Ok(())
    }
}
