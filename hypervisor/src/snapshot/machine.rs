//! `state`: everything of a VM but its memory, as one record.

use std::collections::BTreeMap;

use devices::snapshot::{Record, RestoreError, SaveError, Schema, from_record, to_record};
use guest_protocol::Hello;
use kvm_bindings::kvm_irqchip;
use serde::{Deserialize, Serialize};

use super::vcpu::VcpuState;
use crate::pci_slots::PciState;

/// The state of a VM that stands still.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineState {
    /// All vCPUs, in order.
    pub vcpus: Vec<VcpuState>,
    /// The interrupt controllers.
    pub irqchips: Vec<kvm_irqchip>,
    /// Nanoseconds of the guest's paravirtual clock.
    pub clock_nanos: u64,
    /// Serial port and CMOS clock, by name.
    pub legacy: BTreeMap<String, Record>,
    /// The virtio devices behind their transports, by name.
    pub devices: BTreeMap<String, Record>,
    /// The PCI bus, if there is one.
    pub pci: Option<PciState>,
    /// What the agent had said.
    pub hello: Option<Hello>,
}

impl Schema for MachineState {
    const KIND: &'static str = "machine";
    const VERSION: u32 = 1;
}

/// Why the bytes of a state are refused.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Not CBOR, or not a record.
    #[error("it is no record: {0}")]
    Malformed(String),
    /// More than one record.
    #[error("something follows its record")]
    Trailing,
    /// A record of something else.
    #[error(transparent)]
    Record(#[from] RestoreError),
}

impl MachineState {
    /// The bytes of the file.
    pub fn to_bytes(&self) -> Result<Vec<u8>, SaveError> {
        let mut bytes = Vec::new();
        let record = to_record(self)?;
        // Writing to memory does not fail, and a record has an encoding.
        ciborium::into_writer(&record, &mut bytes).map_err(|error| SaveError::Encode {
            kind: Self::KIND,
            source: ciborium::value::Error::Custom(error.to_string()),
        })?;
        Ok(bytes)
    }

    /// Reads the bytes of a file that nobody vouches for.
    pub fn parse(mut bytes: &[u8]) -> Result<Self, StateError> {
        let record: Record = ciborium::from_reader(&mut bytes)
            .map_err(|error| StateError::Malformed(error.to_string()))?;
        if !bytes.is_empty() {
            return Err(StateError::Trailing);
        }
        Ok(from_record(record)?)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A state with something of everything.
    pub fn example() -> MachineState {
        let record =
            Record { kind: "serial".to_owned(), version: 1, state: ciborium::Value::from(3) };
        MachineState {
            vcpus: vec![VcpuState::default()],
            irqchips: vec![kvm_irqchip { chip_id: 2, ..Default::default() }],
            clock_nanos: 77,
            legacy: BTreeMap::from([("serial".to_owned(), record.clone())]),
            devices: BTreeMap::from([("rng".to_owned(), record)]),
            pci: None,
            hello: Some(Hello::default()),
        }
    }

    #[test]
    fn a_state_comes_back_equal() {
        let bytes = example().to_bytes().unwrap();
        let read = MachineState::parse(&bytes).unwrap();
        assert_eq!(read.to_bytes().unwrap(), bytes);
        assert_eq!((read.clock_nanos, read.irqchips[0].chip_id), (77, 2));
    }

    #[test]
    fn every_truncation_is_refused() {
        let bytes = example().to_bytes().unwrap();
        for len in 0..bytes.len() {
            assert!(MachineState::parse(&bytes[..len]).is_err(), "{len} bytes");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert!(matches!(MachineState::parse(&longer), Err(StateError::Trailing)));
    }

    /// Without the checksum that finds these, nothing may panic or grow.
    #[test]
    fn no_flipped_bit_is_a_panic() {
        let bytes = example().to_bytes().unwrap();
        for bit in (0..bytes.len() * 8).step_by(7) {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let _ = MachineState::parse(&damaged);
        }
    }

    #[test]
    fn absurd_lengths_are_refused() {
        // A map, a byte string and an array that claim 2^62 items; a tower of arrays.
        for head in [0xbb_u8, 0x5b, 0x9b] {
            let bytes = [&[head][..], &[0x40, 0, 0, 0, 0, 0, 0, 0], &[0; 64]].concat();
            assert!(MachineState::parse(&bytes).is_err());
        }
        assert!(MachineState::parse(&[0x81; 1 << 20]).is_err());
    }
}
