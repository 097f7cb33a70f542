//! The saved form of a card, the same whoever moves its frames.

use serde::{Deserialize, Serialize};

use super::{MacAddress, Net, feature, handle};
use crate::snapshot::{RestoreError, SaveError, Schema, Snapshot};

/// The saved form of the card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetState {
    /// The address that the guest knows.
    pub(super) mac: [u8; 6],
    /// The MTU that it was told.
    pub(super) mtu: Option<u16>,
    /// Queue pairs that there are.
    pub(super) max_pairs: u16,
    /// Queue pairs in use.
    pub(super) pairs: u16,
    /// What it has chosen of its offloads.
    pub(super) offloads: Option<u64>,
    /// The status that it was last told.
    pub(super) status: u16,
    /// It has been asked to announce itself and has not done so.
    pub(super) announce: bool,
}

impl Schema for NetState {
    const KIND: &'static str = "virtio-net";
    const VERSION: u32 = 1;
}

impl Net {
    fn check(&self, state: &NetState) -> Result<MacAddress, RestoreError> {
        let invalid = |field, value: String| {
            Err(RestoreError::Invalid { kind: NetState::KIND, field, value })
        };
        let Ok(mac) = MacAddress::new(state.mac) else {
            return invalid("mac", format!("{:02x?}", state.mac));
        };
        let pairs = self.max_pairs();
        if state.max_pairs != pairs {
            return invalid("max_pairs", format!("{}, the card has {pairs}", state.max_pairs));
        }
        if !(1..=pairs).contains(&state.pairs) {
            return invalid("pairs", state.pairs.to_string());
        }
        if state.mtu != self.mtu {
            return invalid("mtu", format!("{:?}, the card has {:?}", state.mtu, self.mtu));
        }
        if state.offloads.is_some_and(|offloads| offloads & !feature::GUEST_OFFLOADS != 0) {
            return invalid("offloads", format!("{:#x}", state.offloads.unwrap_or(0)));
        }
        if state.status & !(handle::status::LINK_UP | handle::status::ANNOUNCE) != 0 {
            return invalid("status", state.status.to_string());
        }
        Ok(mac)
    }
}

impl Snapshot for Net {
    type State = NetState;

    fn save(&self) -> Result<NetState, SaveError> {
        if self.workers.is_some() {
            return Err(SaveError::Running("virtio-net"));
        }
        Ok(NetState {
            mac: self.shared.mac(),
            mtu: self.mtu,
            max_pairs: self.max_pairs(),
            pairs: self.shared.pairs(),
            offloads: self.chosen_offloads,
            status: self.told,
            announce: self.shared.announce_wanted(),
        })
    }

    /// The link is as the operator of this process wants it, whatever it was; the guest is told
    /// when it goes on.
    fn restore(&mut self, state: NetState) -> Result<(), RestoreError> {
        let mac = self.check(&state)?;
        if self.workers.is_some() {
            return Err(RestoreError::Running("virtio-net"));
        }
        self.shared.restore(mac, state.pairs, state.announce);
        self.chosen_offloads = state.offloads;
        self.told = state.status;
        Ok(())
    }
}
