//! A network that is made when the VM is there: `ctr run --cni` and hooks do it in the namespace of
//! the task's process, which is the VMM, between Create and Start. So a VM whose container names no
//! namespace has one of its own, and a card that waits for what comes.

use std::fs::File;
use std::path::Path;

use nix::sched::{CloneFlags, unshare};

use super::{Card, Network, connect_here, in_namespace, on_a_thread, tap};
use crate::error::{Result, io};

/// The name that plugins give to a task's first interface, and the guest to its only card.
const NAME: &str = "eth0";
/// The hardware address of the card until it has a network.
const MAC: &str = "02:63:75:62:65:00";
/// The MTU until then, in bytes.
const MTU: u32 = 1500;

/// A VM's own network namespace.
#[derive(Debug)]
pub struct Own {
    /// It lasts as long as this is open, whatever becomes of the VMM.
    pub namespace: File,
    /// Whether something has been made in it that the guest has.
    pub in_use: bool,
}

/// What a VM has whose container names no namespace.
pub async fn wait_for_one() -> Result<Network> {
    let work = || {
        unshare(CloneFlags::CLONE_NEWNET).map_err(io("make a network namespace"))?;
        let namespace = File::open("/proc/thread-self/ns/net");
        let namespace = namespace.map_err(io("open the network namespace"))?;
        let card = Card {
            name: NAME.to_owned(),
            mac: MAC.to_owned(),
            mtu: MTU,
            addresses: Vec::new(),
            tap: tap::open(0)?,
        };
        let own = Some(Own { namespace, in_use: false });
        Ok(Network { cards: vec![card], own, ..Network::default() })
    };
    on_a_thread(work).await
}

impl Network {
    /// Whether its card still waits for what comes.
    pub fn waits(&self) -> bool {
        self.own.as_ref().is_some_and(|own| !own.in_use)
    }

    /// What has been made in the namespace by now, on the card that waits for it.
    pub async fn look(&self) -> Result<Option<Self>> {
        let (Some(own), [card]) = (&self.own, self.cards.as_slice()) else { return Ok(None) };
        let namespace = own.namespace.try_clone().map_err(io("share the network namespace"))?;
        let tap = card.tap.try_clone().map_err(io("share a TAP"))?;
        let work = move || {
            let path = Path::new("of the task");
            let found = in_namespace(&namespace, path, async || {
                connect_here(path, Some((NAME, &tap))).await
            })?;
            let own = Some(Own { namespace, in_use: true });
            Ok((!found.cards.is_empty()).then_some(Self { own, ..found }))
        };
        on_a_thread(work).await
    }
}
