//! MSI-X (PCI Local Bus 3.0, section 6.8.2): a table of messages, one per vector, that the guest
//! fills and masks, and the bits of those that wait for being unmasked.
//!
//! The table is shared between the register window (vCPU threads) and the interrupts handed to the
//! device (loop threads), so it has a lock of its own; sending happens outside of it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use crate::bus::AccessError;
use crate::irq::Interrupt;

/// Bytes of one table entry.
pub const ENTRY_SIZE: u64 = 16;
/// Capability id.
pub const CAPABILITY: u8 = 0x11;
const VECTOR_MASKED: u32 = 1;
const CONTROL_ENABLE: u16 = 1 << 15;
const CONTROL_MASK_ALL: u16 = 1 << 14;

/// A message: the write that raises an interrupt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Address of the write.
    pub address: u64,
    /// What is written.
    pub data: u32,
}

/// Delivers messages to the interrupt controllers. Called from any thread; must not block.
pub type MessageSink = Arc<dyn Fn(Message) + Send + Sync>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Vector {
    message: Message,
    control: u32,
    pending: bool,
}

impl Vector {
    /// After reset every vector is masked.
    const RESET: Vector =
        Vector { message: Message { address: 0, data: 0 }, control: VECTOR_MASKED, pending: false };
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Table {
    vectors: Vec<Vector>,
    control: u16,
}

impl Table {
    fn is_masked(&self, vector: &Vector) -> bool {
        self.control & (CONTROL_ENABLE | CONTROL_MASK_ALL) != CONTROL_ENABLE
            || vector.control & VECTOR_MASKED != 0
    }

    /// Raises `index`: the message to send now, or none if it has to wait.
    fn raise(&mut self, index: usize) -> Option<Message> {
        let vector = *self.vectors.get(index)?;
        if !self.is_masked(&vector) {
            return Some(vector.message);
        }
        // With MSI-X off there is no interrupt at all: nothing waits.
        if self.control & CONTROL_ENABLE != 0
            && let Some(vector) = self.vectors.get_mut(index)
        {
            vector.pending = true;
        }
        None
    }

    /// Messages that waited and can go now.
    fn take_unmasked(&mut self) -> Vec<Message> {
        let mut messages = Vec::new();
        for index in 0..self.vectors.len() {
            let Some(vector) = self.vectors.get(index).copied() else { continue };
            if vector.pending && !self.is_masked(&vector) {
                messages.push(vector.message);
                if let Some(vector) = self.vectors.get_mut(index) {
                    vector.pending = false;
                }
            }
        }
        messages
    }
}

/// The vectors of one function. Clones share them.
#[derive(Clone)]
pub struct Msix {
    table: Arc<Mutex<Table>>,
    sink: MessageSink,
}

impl Msix {
    /// `count` vectors (1 to 2048), all masked.
    pub fn new(count: u16, sink: MessageSink) -> Self {
        let table = Table { vectors: vec![Vector::RESET; usize::from(count)], control: 0 };
        Self { table: Arc::new(Mutex::new(table)), sink }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of vectors.
    pub fn count(&self) -> u16 {
        self.table().vectors.len() as u16
    }

    /// Raises a vector; one that does not exist is none (VIRTIO_MSI_NO_VECTOR among them).
    pub fn raise(&self, vector: u16) {
        let message = self.table().raise(usize::from(vector));
        if let Some(message) = message {
            (self.sink)(message);
        }
    }

    /// A line that raises whatever `vector` gives at that time.
    pub fn interrupt(&self, vector: impl Fn() -> u16 + Send + Sync + 'static) -> Interrupt {
        let this = self.clone();
        Interrupt::from_fn(move || this.raise(vector()))
    }

    /// The guest wrote the message control register.
    pub fn set_control(&self, control: u16) {
        self.change(|table| table.control = control & (CONTROL_ENABLE | CONTROL_MASK_ALL));
    }

    fn change(&self, change: impl FnOnce(&mut Table)) {
        let messages = {
            let mut table = self.table();
            change(&mut table);
            table.take_unmasked()
        };
        for message in messages {
            (self.sink)(message);
        }
    }

    /// All vectors masked and empty, as after a reset of the function.
    pub fn reset(&self) {
        let mut table = self.table();
        table.control = 0;
        table.vectors.fill(Vector::RESET);
    }

    /// Reads the table: 4 or 8 bytes, aligned.
    pub fn read_table(&self, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        let words = words_of(offset, data.len())?;
        let table = self.table();
        for (word, chunk) in words.zip(data.chunks_exact_mut(4)) {
            let vector = table.vectors.get(word / 4);
            let value = vector.map_or(0, |vector| match word % 4 {
                0 => vector.message.address as u32,
                1 => (vector.message.address >> 32) as u32,
                2 => vector.message.data,
                _ => vector.control,
            });
            chunk.copy_from_slice(&value.to_le_bytes());
        }
        Ok(())
    }

    /// Writes the table: 4 or 8 bytes, aligned.
    pub fn write_table(&self, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        let words = words_of(offset, data.len())?;
        self.change(|table| {
            for (word, chunk) in words.zip(data.chunks_exact(4)) {
                let (Some(vector), Ok(bytes)) =
                    (table.vectors.get_mut(word / 4), <[u8; 4]>::try_from(chunk))
                else {
                    continue;
                };
                let value = u32::from_le_bytes(bytes);
                let address = &mut vector.message.address;
                match word % 4 {
                    // The two low bits of an address are reserved.
                    0 => *address = (*address & !0xffff_ffff) | u64::from(value & !3),
                    1 => *address = (*address & 0xffff_ffff) | (u64::from(value) << 32),
                    2 => vector.message.data = value,
                    _ => vector.control = value & VECTOR_MASKED,
                }
            }
        });
        Ok(())
    }

    /// Reads the pending bits: 4 or 8 bytes, aligned. They are read-only.
    pub fn read_pending(&self, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        words_of(offset, data.len())?;
        let table = self.table();
        let first = usize::try_from(offset).unwrap_or(usize::MAX).saturating_mul(8);
        for (index, byte) in data.iter_mut().enumerate() {
            let start = first.saturating_add(index * 8);
            let bits = table.vectors.iter().skip(start).take(8).enumerate();
            *byte = bits.fold(0, |byte, (bit, vector)| byte | (u8::from(vector.pending) << bit));
        }
        Ok(())
    }

    /// The saved form.
    pub fn record(&self) -> MsixRecord {
        MsixRecord(self.table().clone())
    }

    /// True if a record is of as many vectors.
    pub fn fits(&self, record: &MsixRecord) -> bool {
        record.0.vectors.len() == self.table().vectors.len()
    }

    /// Applies a record that fits; another changes nothing.
    pub fn restore(&self, record: &MsixRecord) {
        if self.fits(record) {
            *self.table() = record.0.clone();
        }
    }
}

fn words_of(offset: u64, len: usize) -> Result<std::ops::Range<usize>, AccessError> {
    let refused = AccessError::BadSize { offset, len };
    if !matches!(len, 4 | 8) || !offset.is_multiple_of(len as u64) {
        return Err(refused);
    }
    let first = usize::try_from(offset / 4).map_err(|_| refused)?;
    Ok(first..first + len / 4)
}

/// A saved table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MsixRecord(Table);

#[cfg(test)]
mod tests {
    use super::*;

    fn msix() -> (Msix, Arc<Mutex<Vec<Message>>>) {
        let sent = Arc::new(Mutex::new(Vec::new()));
        let log = sent.clone();
        (Msix::new(3, Arc::new(move |message| log.lock().unwrap().push(message))), sent)
    }

    const MESSAGE: Message = Message { address: 0xfee0_1000, data: 0x31 };

    fn fill(msix: &Msix, vector: u64, control: u32) {
        let at = vector * ENTRY_SIZE;
        msix.write_table(at, &MESSAGE.address.to_le_bytes()).unwrap();
        msix.write_table(at + 8, &MESSAGE.data.to_le_bytes()).unwrap();
        msix.write_table(at + 12, &control.to_le_bytes()).unwrap();
    }

    #[test]
    fn an_enabled_vector_sends_its_message() {
        let (msix, sent) = msix();
        msix.set_control(CONTROL_ENABLE);
        fill(&msix, 1, 0);
        msix.interrupt(|| 1).raise();
        assert_eq!(*sent.lock().unwrap(), [MESSAGE]);
    }

    #[test]
    fn a_masked_vector_waits_and_is_sent_once() {
        let (msix, sent) = msix();
        msix.set_control(CONTROL_ENABLE | CONTROL_MASK_ALL);
        fill(&msix, 2, 0);
        msix.raise(2);
        msix.raise(2);
        let mut pending = [0; 8];
        msix.read_pending(0, &mut pending).unwrap();
        assert_eq!((pending[0], sent.lock().unwrap().len()), (0b100, 0));
        msix.set_control(CONTROL_ENABLE);
        assert_eq!(*sent.lock().unwrap(), [MESSAGE]);
    }

    #[test]
    fn disabled_and_absent_vectors_send_nothing() {
        let (msix, sent) = msix();
        fill(&msix, 0, 0);
        msix.raise(0);
        msix.set_control(CONTROL_ENABLE);
        msix.raise(3);
        msix.raise(u16::MAX);
        assert!(sent.lock().unwrap().is_empty());
    }

    #[test]
    fn odd_accesses_are_refused_and_those_beyond_the_table_are_harmless() {
        let (msix, _) = msix();
        assert!(msix.write_table(2, &[0; 4]).is_err());
        assert!(msix.write_table(4, &[0; 8]).is_err());
        assert!(msix.read_table(0, &mut [0; 2]).is_err());
        assert!(msix.write_table(1 << 40, &[0xff; 8]).is_ok());
        let mut data = [1; 8];
        msix.read_pending(1 << 40, &mut data).unwrap();
        assert_eq!(data, [0; 8]);
    }

    #[test]
    fn a_record_of_another_size_is_refused() {
        let (msix, sent) = msix();
        let other = Msix::new(2, Arc::new(|_| {}));
        assert!(!msix.fits(&other.record()));
        fill(&msix, 0, 0);
        let before = msix.record();
        msix.restore(&other.record());
        assert_eq!(msix.record(), before);
        assert!(sent.lock().unwrap().is_empty());
    }
}
