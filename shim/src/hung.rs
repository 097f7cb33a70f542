//! Guests, and file servers, that do not answer. They would keep their pod, and whoever waits for the
//! pod's end, for ever.

use std::sync::Arc;
use std::time::Duration;

use guest_protocol::Request;
use hypervisor::api;

use crate::container::Container;
use crate::error::Result;
use crate::sandbox::Sandbox;
use crate::vm::Vm;

/// How long a guest may take to say that it is there, and what was killed in it to end.
const ANSWER: Duration = Duration::from_secs(8);
/// The same for one in which nothing else is than what was killed.
const LAST_ANSWER: Duration = Duration::from_secs(3);

impl Sandbox {
    /// Does this to end a container in the guest, and ends the VM if the guest does not answer at all
    /// meanwhile, which is as good.
    pub async fn unless_hung(
        &self,
        vm: &Vm,
        container: &Container,
        work: impl Future<Output = Result<()>>,
    ) -> Result<()> {
        let patience = self.patience(container);
        let hung = async {
            if tokio::time::timeout(patience, vm.guest.call(&Request::Ping)).await.is_ok() {
                // What else the work fails with is its own affair.
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            done = work => done,
            () = hung => {
                tracing::warn!(?patience, "no answer from the guest: the VM is killed");
                vm.vmm.kill().await;
                Ok(())
            }
        }
    }

    /// Sees to it that a container that was killed ends: its processes wait for their files for ever
    /// if those are not served any more, and cannot be killed while they do.
    pub fn watch_killed(&self, vm: &Arc<Vm>, container: &Arc<Container>) {
        let (patience, vm, container) = (self.patience(container), vm.clone(), container.clone());
        tokio::spawn(async move {
            let ended = tokio::time::timeout(patience, container.init.wait()).await;
            if ended.is_err() && vm.has_lost_its_files().await {
                tracing::warn!(id = container.id, "files are not served: the VM is killed");
                vm.vmm.kill().await;
            }
        });
    }

    fn patience(&self, container: &Container) -> Duration {
        if self.is_alone(container) { LAST_ANSWER } else { ANSWER }
    }
}

impl Vm {
    /// Whether a file server does not answer. If the VMM does not, nothing is known of that.
    async fn has_lost_its_files(&self) -> bool {
        match self.vmm.ask(&api::Request::Shares {}).await {
            Ok(api::Reply::Shares { shares }) => {
                shares.iter().any(|share| share.allowed && share.status.is_none())
            }
            _ => false,
        }
    }
}
