//! Gives the guest what a network plugin has made for its pod: each interface of the pod's network
//! namespace gets a TAP beside it, all that arrives at the one is sent out of the other, and the
//! guest's card has the interface's address. So peers, switches and the plugin see what they expect.
//!
//! Nothing of it needs to be cleared away: the TAPs go with the VMM, and the redirections with the
//! namespace, which is the plugin's.

use std::fs::File;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use futures_util::TryStreamExt;
use nix::sched::{CloneFlags, setns};
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::address::AddressAttribute;
use rtnetlink::packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use rtnetlink::packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourState};
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute, RouteMessage};
use rtnetlink::{Handle, LinkUnspec, RouteMessageBuilder};
use serde_json::Value;

mod later;
mod script;
mod tap;

pub use later::{Own, wait_for_one};

use crate::error::{Error, Result, io};

/// `ETH_P_ALL`.
const ALL_PROTOCOLS: u16 = 3;
/// The parent of filters on what arrives.
const INGRESS: u32 = 0xffff_0000;
/// The table of routes that are not special.
const MAIN_TABLE: u8 = 254;

/// What the guest shall have.
#[derive(Debug, Default)]
pub struct Network {
    /// Its cards, in the order of their names.
    pub cards: Vec<Card>,
    /// Its routes: those without a gateway first, which the others need.
    pub routes: Vec<Route>,
    /// Neighbours that were entered by hand.
    pub neighbours: Vec<Neighbour>,
    /// The VM's own namespace, if it is in no other.
    pub own: Option<Own>,
}

/// A card.
#[derive(Debug)]
pub struct Card {
    /// The interface's name, in the pod and in the guest.
    pub name: String,
    /// Its hardware address.
    pub mac: String,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// Its addresses, each with the length of its network's prefix.
    pub addresses: Vec<(IpAddr, u8)>,
    /// The host's end.
    pub tap: OwnedFd,
}

/// A route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// To where; `None` is anywhere.
    pub to: Option<(IpAddr, u8)>,
    /// Over whom.
    pub gateway: Option<IpAddr>,
    /// Over which card.
    pub card: String,
    /// Of IPv6.
    pub v6: bool,
}

/// A neighbour.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Neighbour {
    pub address: IpAddr,
    pub mac: String,
    pub card: String,
}

/// The network namespace that a spec wants its container to be in. `None` is one of its own, with
/// nothing in it.
pub fn namespace(spec: &Value) -> Result<Option<PathBuf>> {
    let namespaces = spec["linux"]["namespaces"].as_array();
    let mut network = namespaces.into_iter().flatten().filter(|each| each["type"] == "network");
    match network.next() {
        Some(found) => Ok(found["path"].as_str().filter(|path| !path.is_empty()).map(Into::into)),
        None => Err(Error::Invalid(
            "the container wants the host's network, which a VM cannot have; leave out hostNetwork \
             (--net-host), or use another runtime for it"
                .to_owned(),
        )),
    }
}

/// Connects the interfaces in the namespace at `path` to TAPs.
pub async fn connect(path: PathBuf) -> Result<Network> {
    let work = move || {
        let failed = || format!("open the network namespace {}", path.display());
        let namespace = File::open(&path).map_err(io(failed()))?;
        in_namespace(&namespace, &path, async || connect_here(&path, None).await)
    };
    on_a_thread(work).await
}

/// Runs work on a thread of its own, which may change its namespace, and ends.
async fn on_a_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (done, result) = tokio::sync::oneshot::channel();
    std::thread::Builder::new()
        .name("network".to_owned())
        .spawn(move || drop(done.send(work())))
        .map_err(io("start a thread for the network"))?;
    result.await.map_err(|error| Error::Unavailable(error.to_string()))?
}

/// Does this in a network namespace, on a thread that ends afterwards.
fn in_namespace<T>(
    namespace: &File,
    path: &Path,
    work: impl AsyncFnOnce() -> Result<T>,
) -> Result<T> {
    setns(namespace, CloneFlags::CLONE_NEWNET)
        .map_err(io(format!("enter the network namespace {}", path.display())))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(io("start a thread for the network"))?;
    runtime.block_on(work())
}

/// Connects the interfaces of this thread's namespace to new TAPs, or the `only` one that may be
/// there to this TAP.
async fn connect_here(path: &Path, only: Option<(&str, &OwnedFd)>) -> Result<Network> {
    let (connection, handle, _) = rtnetlink::new_connection().map_err(io("open netlink"))?;
    tokio::spawn(connection);
    let failed = |what: &str, error: rtnetlink::Error| {
        Error::Unavailable(format!("{what} in the network namespace {}: {error}", path.display()))
    };
    let links = handle.link().get().execute().try_collect::<Vec<_>>().await;
    let links = links.map_err(|error| failed("cannot list the interfaces", error))?;
    let interfaces: Vec<_> = links.iter().filter_map(Interface::of).collect();
    if let Some((name, _)) = only {
        check_only(name, &interfaces)?;
    }
    let mut network = Network::default();
    let mut names = Vec::new();
    for interface in interfaces {
        let index = interface.index;
        let tap = match only {
            Some((_, tap)) => tap.try_clone().map_err(io("share a TAP"))?,
            None => tap::open(names.len())?,
        };
        let mut card = interface.on(tap);
        redirect(&handle, index, &card)
            .await
            .map_err(|error| failed(&format!("cannot connect {} to its TAP", card.name), error))?;
        card.addresses = addresses(&handle, index)
            .await
            .map_err(|error| failed("cannot list the addresses", error))?;
        names.push((index, card.name.clone()));
        network.cards.push(card);
    }
    network.cards.sort_by(|one, other| one.name.cmp(&other.name));
    network.routes =
        routes(&handle, &names).await.map_err(|error| failed("cannot list the routes", error))?;
    network.neighbours = neighbours(&handle, &names)
        .await
        .map_err(|error| failed("cannot list the neighbours", error))?;
    Ok(network)
}

/// An interface that a plugin has made.
struct Interface {
    index: u32,
    name: String,
    mac: String,
    mtu: u32,
}

impl Interface {
    /// None for what is no Ethernet, or a TAP of a VM's.
    fn of(link: &LinkMessage) -> Option<Self> {
        let (mut name, mut mac, mut mtu) = (String::new(), None, 1500);
        for attribute in &link.attributes {
            match attribute {
                LinkAttribute::IfName(value) => name.clone_from(value),
                LinkAttribute::Address(value) if value.len() == 6 => mac = Some(hex(value)),
                LinkAttribute::Mtu(value) => mtu = *value,
                _ => {}
            }
        }
        let mac = mac.filter(|mac| mac != "00:00:00:00:00:00")?;
        let loopback = link.header.flags.contains(LinkFlags::Loopback);
        let plugins = !loopback && !tap::is_ours(&name);
        plugins.then_some(Self { index: link.header.index, name, mac, mtu })
    }

    fn on(self, tap: OwnedFd) -> Card {
        let Self { name, mac, mtu, .. } = self;
        Card { name, mac, mtu, addresses: Vec::new(), tap }
    }
}

/// Refuses interfaces that no card waits for.
fn check_only(name: &str, interfaces: &[Interface]) -> Result<()> {
    let names: Vec<_> = interfaces.iter().map(|each| each.name.as_str()).collect();
    match names.as_slice() {
        [] => Ok(()),
        [one] if *one == name => Ok(()),
        others => Err(Error::State(format!(
            "a network that is made after the VM has one interface, {name}, and this one has \
             {others:?}; make the network first and name its namespace (ctr: --with-ns)"
        ))),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":")
}

/// Sends what arrives at the interface out of the card's TAP, and the other way round.
async fn redirect(
    handle: &Handle,
    interface: u32,
    card: &Card,
) -> std::result::Result<(), rtnetlink::Error> {
    let number = tap::interface(&card.tap);
    let up = LinkUnspec::new_with_index(number).mtu(card.mtu).up().build();
    handle.link().change(up).execute().await?;
    for (from, to) in [(interface, number), (number, interface)] {
        let index = from.cast_signed();
        match handle.qdisc().add(index).ingress().execute().await {
            // A predecessor's; its redirection went with its TAP.
            Err(rtnetlink::Error::NetlinkError(error)) if error.raw_code() == -libc::EEXIST => {}
            done => done?,
        }
        let filter = handle.traffic_filter(index).add();
        // The kernel wants it in the order of the network.
        let protocol = ALL_PROTOCOLS.to_be();
        filter.parent(INGRESS).protocol(protocol).redirect(to)?.execute().await?;
    }
    Ok(())
}

async fn addresses(
    handle: &Handle,
    interface: u32,
) -> std::result::Result<Vec<(IpAddr, u8)>, rtnetlink::Error> {
    let mut found = Vec::new();
    let mut all = handle.address().get().set_link_index_filter(interface).execute();
    while let Some(message) = all.try_next().await? {
        let address = message.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Address(address) => Some(*address),
            _ => None,
        });
        // The guest makes its own link-local addresses, from the same hardware address.
        let address = address.filter(|address| !is_link_local(address));
        found.extend(address.map(|address| (address, message.header.prefix_len)));
    }
    Ok(found)
}

fn is_link_local(address: &IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.is_unicast_link_local())
}

async fn routes(
    handle: &Handle,
    names: &[(u32, String)],
) -> std::result::Result<Vec<Route>, rtnetlink::Error> {
    let mut found = Vec::new();
    for message in [
        RouteMessageBuilder::<std::net::Ipv4Addr>::new().build(),
        RouteMessageBuilder::<std::net::Ipv6Addr>::new().build(),
    ] {
        let mut all = handle.route().get(message).execute();
        while let Some(message) = all.try_next().await? {
            found.extend(route(&message, names));
        }
    }
    found.sort_by_key(|route| route.gateway.is_some());
    Ok(found)
}

fn route(message: &RouteMessage, names: &[(u32, String)]) -> Option<Route> {
    let (mut to, mut gateway, mut card) = (None, None, None);
    let address = |address: &RouteAddress| match address {
        RouteAddress::Inet(address) => Some(IpAddr::V4(*address)),
        RouteAddress::Inet6(address) => Some(IpAddr::V6(*address)),
        _ => None,
    };
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(value) => to = address(value),
            RouteAttribute::Gateway(value) => gateway = address(value),
            RouteAttribute::Oif(value) => card = names.iter().find(|(index, _)| index == value),
            _ => {}
        }
    }
    let special = message.header.table != MAIN_TABLE;
    let own = to.is_some_and(|to| is_link_local(&to) || to.is_multicast());
    (!special && !own).then_some(())?;
    Some(Route {
        to: to.map(|to| (to, message.header.destination_prefix_length)),
        gateway,
        card: card?.1.clone(),
        v6: message.header.address_family == AddressFamily::Inet6,
    })
}

async fn neighbours(
    handle: &Handle,
    names: &[(u32, String)],
) -> std::result::Result<Vec<Neighbour>, rtnetlink::Error> {
    let mut found = Vec::new();
    let mut all = handle.neighbours().get().execute();
    while let Some(message) = all.try_next().await? {
        let name = names.iter().find(|(index, _)| *index == message.header.ifindex);
        let (Some((_, card)), NeighbourState::Permanent) = (name, message.header.state) else {
            continue;
        };
        let (mut address, mut mac) = (None, None);
        for attribute in &message.attributes {
            match attribute {
                NeighbourAttribute::Destination(NeighbourAddress::Inet(value)) => {
                    address = Some(IpAddr::V4(*value));
                }
                NeighbourAttribute::Destination(NeighbourAddress::Inet6(value)) => {
                    address = Some(IpAddr::V6(*value));
                }
                NeighbourAttribute::LinkLayerAddress(value) => mac = Some(hex(value)),
                _ => {}
            }
        }
        if let (Some(address), Some(mac)) = (address, mac) {
            found.push(Neighbour { address, mac, card: card.clone() });
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn more_than_one_interface_that_comes_later_is_refused_by_name() {
        let interface = |name: &str| Interface {
            index: 2,
            name: name.to_owned(),
            mac: "02:00:00:00:00:07".to_owned(),
            mtu: 1500,
        };
        check_only("eth0", &[]).unwrap();
        check_only("eth0", &[interface("eth0")]).unwrap();
        assert!(check_only("eth0", &[interface("net1")]).is_err());
        let two = [interface("eth0"), interface("net1")];
        let error = check_only("eth0", &two).unwrap_err().to_string();
        assert!(error.contains("net1") && error.contains("--with-ns"), "{error}");
    }

    #[test]
    fn the_host_s_network_is_refused() {
        let error = namespace(&json!({"linux": {"namespaces": []}})).unwrap_err().to_string();
        assert!(error.contains("hostNetwork"), "{error}");
        let own = json!({"linux": {"namespaces": [{"type": "network"}]}});
        assert_eq!(namespace(&own).unwrap(), None);
        let pod = json!({"linux": {"namespaces": [{"type": "network", "path": "/run/netns/x"}]}});
        assert_eq!(namespace(&pod).unwrap(), Some("/run/netns/x".into()));
    }

    #[test]
    fn only_plain_routes_over_known_cards_are_taken() {
        let mut message = RouteMessage::default();
        message.header.table = MAIN_TABLE;
        message.attributes.push(RouteAttribute::Oif(7));
        let names = [(7, "eth0".to_owned())];
        assert_eq!(route(&message, &names).unwrap().card, "eth0");
        assert_eq!(route(&message, &[]), None);
        message.header.table = 255;
        assert_eq!(route(&message, &names), None);
    }
}
