//! Guests that do not answer. One would keep its pod, and whoever waits for the pod's end, for ever.

use std::time::Duration;

use guest_protocol::Request;

use crate::error::Result;
use crate::sandbox::Sandbox;
use crate::vm::Vm;

/// How long a guest may take to say that it is there.
const ANSWER: Duration = Duration::from_secs(8);

impl Sandbox {
    /// Does this to end something in the guest, and ends the VM if the guest does not answer at all
    /// meanwhile, which is as good.
    pub async fn unless_hung(&self, vm: &Vm, work: impl Future<Output = Result<()>>) -> Result<()> {
        let hung = async {
            if tokio::time::timeout(ANSWER, vm.guest.call(&Request::Ping)).await.is_ok() {
                // What else the work fails with is its own affair.
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            done = work => done,
            () = hung => {
                tracing::warn!(seconds = ANSWER.as_secs(), "no answer from the guest: the VM is killed");
                vm.vmm.kill().await;
                Ok(())
            }
        }
    }
}
