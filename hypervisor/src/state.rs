//! The states of a VM and which request is legal in which. Only the control thread changes them.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::api::Request;

/// Where a VM is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmState {
    /// Built; no vCPU has run.
    Created,
    /// The guest runs.
    Running,
    /// vCPUs parked, devices stopped.
    Paused,
    /// The guest has ended; the process is about to.
    Ended,
}

impl fmt::Display for VmState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            VmState::Created => "created",
            VmState::Running => "running",
            VmState::Paused => "paused",
            VmState::Ended => "ended",
        })
    }
}

/// A request in a state where it is not legal.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{request} is not legal while the VM is {state}")]
pub struct Illegal {
    /// The request.
    pub request: &'static str,
    /// The state.
    pub state: VmState,
}

/// Whether `request` may be carried out in `state`.
pub fn check(state: VmState, request: &Request) -> Result<(), Illegal> {
    let (name, legal) = match request {
        Request::Info {} => ("info", true),
        Request::Metrics { .. } => ("metrics", true),
        Request::Shares {} => ("shares", true),
        Request::AllowShares { .. } => ("allow_shares", true),
        Request::Pause {} => ("pause", state == VmState::Running),
        Request::Resume {} => ("resume", state == VmState::Paused),
        Request::Snapshot(_) => ("snapshot", matches!(state, VmState::Running | VmState::Paused)),
        Request::RecordHotPages { .. } => {
            ("record_hot_pages", matches!(state, VmState::Running | VmState::Paused))
        }
        Request::SetBalloon { .. } => ("set_balloon", state == VmState::Running),
        Request::NewGeneration {} => {
            ("new_generation", matches!(state, VmState::Running | VmState::Paused))
        }
        Request::AddDisk { .. } => ("add_disk", state == VmState::Running),
        Request::AddNet { .. } => ("add_net", state == VmState::Running),
        Request::RemoveDevice { .. } => ("remove_device", state == VmState::Running),
        Request::Stop { .. } => ("stop", true),
    };
    if legal { Ok(()) } else { Err(Illegal { request: name, state }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{MetricsFormat, StopHow};

    const STATES: [VmState; 4] =
        [VmState::Created, VmState::Running, VmState::Paused, VmState::Ended];

    #[test]
    fn pause_and_resume_alternate() {
        let legal_in = |request: Request| -> Vec<VmState> {
            STATES.into_iter().filter(|&state| check(state, &request).is_ok()).collect()
        };
        assert_eq!(legal_in(Request::Pause {}), [VmState::Running]);
        assert_eq!(legal_in(Request::Resume {}), [VmState::Paused]);
    }

    #[test]
    fn a_vm_can_always_be_asked_and_stopped() {
        for state in STATES {
            assert_eq!(check(state, &Request::Info {}), Ok(()));
            let metrics = Request::Metrics { format: MetricsFormat::Json };
            assert_eq!(check(state, &metrics), Ok(()));
            let stop = Request::Stop { how: StopHow::Kill, timeout_ms: 0 };
            assert_eq!(check(state, &stop), Ok(()));
        }
    }

    #[test]
    fn a_refusal_names_request_and_state() {
        let error = check(VmState::Paused, &Request::Pause {}).unwrap_err();
        assert_eq!(error.to_string(), "pause is not legal while the VM is paused");
    }
}
