//! What a check of a guest must survive.

use hypervisor::api::Request;

use crate::vm::TestVm;

/// Something that the guest should not notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The VM stands still for a moment.
    PauseResume,
}

impl Step {
    #[track_caller]
    fn take(self, vm: &TestVm) {
        match self {
            Self::PauseResume => {
                vm.ask(&Request::Pause {});
                vm.ask(&Request::Resume {});
            }
        }
    }
}

/// Makes a check, and again after each of the steps.
///
/// # Panics
/// If the check does, or a step fails.
#[track_caller]
pub fn lifecycle(vm: &TestVm, steps: &[Step], check: impl Fn(&TestVm)) {
    check(vm);
    for step in steps {
        step.take(vm);
        check(vm);
    }
}
