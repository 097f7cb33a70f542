//! The saved form: what the guest knows of the device. A backend that differs cannot take its place.

use serde::{Deserialize, Serialize};

use super::VhostUser;
use crate::snapshot::{RestoreError, SaveError, Schema, Snapshot};

/// The saved form of a [`VhostUser`]. What is in the backend is the backend's business; it has
/// nothing in flight.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VhostUserState {
    queues: u16,
    config: Vec<u8>,
}

impl Schema for VhostUserState {
    const KIND: &'static str = "vhost-user-blk";
    const VERSION: u32 = 1;
}

impl Snapshot for VhostUser {
    type State = VhostUserState;

    fn save(&self) -> Result<VhostUserState, SaveError> {
        if self.backend.is_live() {
            return Err(SaveError::Running("vhost-user disk"));
        }
        Ok(VhostUserState { queues: self.queues, config: self.backend.config().to_vec() })
    }

    fn restore(&mut self, state: VhostUserState) -> Result<(), RestoreError> {
        let invalid = |field, value: String| {
            Err(RestoreError::Invalid { kind: VhostUserState::KIND, field, value })
        };
        if self.backend.is_live() {
            return Err(RestoreError::Running("vhost-user disk"));
        }
        if state.queues != self.queues {
            let queues = self.queues;
            return invalid("queues", format!("{}, device has {queues}", state.queues));
        }
        if state.config != self.backend.config() {
            return invalid("config", format!("{} bytes", state.config.len()));
        }
        Ok(())
    }
}
