//! Gives a network interface other addresses than it had, and tells the neighbours.

use crate::netlink::{CREATE, Message, Netlink, REPLACE};
use crate::refusal::Refusal;
use guest_protocol::{Interface, Neighbour};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{
    AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage,
};
use netlink_packet_route::link::{LinkFlags, LinkMessage};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use nix::errno::Errno;
use nix::net::if_::if_nametoindex;
use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

/// How long an interface may take to come up.
const PATIENCE: Duration = Duration::from_secs(2);

/// Makes `interface` what the host says: in the place of all addresses, routes and neighbours.
pub fn configure(interface: &Interface) -> Result<(), Refusal> {
    let name = interface.name.as_str();
    let index = if_nametoindex(name).map_err(Refusal::system("find the network interface"))?;
    let mut netlink = Netlink::open().map_err(Refusal::system("talk to the network stack"))?;
    clear(&mut netlink, name, index)?;
    let up = netlink.change(&raise(index), 0);
    up.map_err(Refusal::system("raise the network interface"))?;
    for address in &interface.addresses {
        let message = new_address(index, address.address, address.bits);
        let added = netlink.change(&message, CREATE);
        added.map_err(Refusal::system("add an address"))?;
    }
    for neighbour in &interface.neighbours {
        let added = netlink.change(&new_neighbour(index, neighbour), REPLACE);
        added.map_err(Refusal::system("add a neighbour"))?;
    }
    for gateway in &interface.gateways {
        let added = netlink.change(&default_route(index, *gateway), REPLACE);
        added.map_err(Refusal::system("add a default route"))?;
    }
    wait_for_carrier(name);
    for address in &interface.addresses {
        if let IpAddr::V4(address) = address.address {
            announce(name, index, address).map_err(Refusal::system("tell the neighbours"))?;
        }
    }
    Ok(())
}

/// Where the interface of an address stands in a message (struct ifaddrmsg).
const ADDRESS_INDEX: usize = 4;

/// Takes everything from the interface. With the last IPv4 address the kernel forgets routes and
/// neighbours, and IPv6 forgets all when it is turned off.
fn clear(netlink: &mut Netlink, name: &str, index: u32) -> Result<(), Refusal> {
    let mut query = AddressMessage::default();
    query.header.family = AddressFamily::Inet;
    let all = netlink.list(&Message::new(libc::RTM_GETADDR, &query));
    for address in all.map_err(Refusal::system("list addresses"))? {
        if address.word(ADDRESS_INDEX) != Some(index) {
            continue;
        }
        match netlink.change(&address.into_kind(libc::RTM_DELADDR), 0) {
            // A secondary one goes with its primary one.
            Ok(()) | Err(Errno::EADDRNOTAVAIL) => {}
            Err(errno) => return Err(Refusal::system("remove an address")(errno)),
        }
    }
    let conf = format!("/proc/sys/net/ipv6/conf/{name}");
    // Without IPv6 in the kernel there is nothing to do.
    if fs::write(format!("{conf}/disable_ipv6"), "1").is_ok() {
        let on = fs::write(format!("{conf}/disable_ipv6"), "0");
        on.map_err(Refusal::io("turn IPv6 on again"))?;
        // So that the kernel announces its addresses.
        let _ = fs::write(format!("{conf}/ndisc_notify"), "1");
    }
    Ok(())
}

fn raise(index: u32) -> Message {
    let mut link = LinkMessage::default();
    link.header.index = index;
    link.header.flags = LinkFlags::Up;
    link.header.change_mask = LinkFlags::Up;
    Message::new(libc::RTM_SETLINK, &link)
}

fn family(address: IpAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 }
}

fn new_address(index: u32, address: IpAddr, bits: u8) -> Message {
    let mut message = AddressMessage::default();
    message.header.family = family(address);
    message.header.prefix_len = bits;
    message.header.index = index;
    // The host vouches for it: no second of waiting whether somebody else has it.
    message.header.flags = AddressHeaderFlags::Nodad;
    message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
    message.attributes.push(AddressAttribute::Local(address));
    message.attributes.push(AddressAttribute::Address(address));
    if let (IpAddr::V4(address), 1..=30) = (address, bits) {
        let broadcast = Ipv4Addr::from(u32::from(address) | (u32::MAX >> bits));
        message.attributes.push(AddressAttribute::Broadcast(broadcast));
    }
    Message::new(libc::RTM_NEWADDR, &message)
}

fn new_neighbour(index: u32, neighbour: &Neighbour) -> Message {
    let mut message = NeighbourMessage::default();
    message.header.family = family(neighbour.address);
    message.header.ifindex = index;
    message.header.state = NeighbourState::Permanent;
    let address = match neighbour.address {
        IpAddr::V4(address) => NeighbourAddress::Inet(address),
        IpAddr::V6(address) => NeighbourAddress::Inet6(address),
    };
    message.attributes.push(NeighbourAttribute::Destination(address));
    message.attributes.push(NeighbourAttribute::LinkLayerAddress(neighbour.mac.to_vec()));
    Message::new(libc::RTM_NEWNEIGH, &message)
}

fn default_route(index: u32, gateway: IpAddr) -> Message {
    let mut message = RouteMessage::default();
    message.header.address_family = family(gateway);
    message.header.table = RouteHeader::RT_TABLE_MAIN;
    message.header.protocol = RouteProtocol::Static;
    message.header.scope = RouteScope::Universe;
    message.header.kind = RouteType::Unicast;
    message.attributes.push(RouteAttribute::Gateway(gateway.into()));
    message.attributes.push(RouteAttribute::Oif(index));
    Message::new(libc::RTM_NEWROUTE, &message)
}

/// An interface that has just been raised may not send yet. One without a cable is left alone.
fn wait_for_carrier(name: &str) {
    let start = Instant::now();
    let state = || fs::read_to_string(format!("/sys/class/net/{name}/operstate"));
    while state().is_ok_and(|state| state.trim() == "down") && start.elapsed() < PATIENCE {
        thread::sleep(Duration::from_millis(2));
    }
}

/// Ethernet to everybody, then ARP: "who has my address? tell me", which all who know the address
/// take for news of it (RFC 5227, section 3).
fn gratuitous_arp(mac: [u8; 6], address: Ipv4Addr) -> [u8; 42] {
    let mut frame = [0; 42];
    frame[..6].fill(0xff);
    frame[6..12].copy_from_slice(&mac);
    // Ethertype ARP; hardware Ethernet, protocol IPv4, their lengths, a request.
    frame[12..22].copy_from_slice(&[0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 1]);
    frame[22..28].copy_from_slice(&mac);
    frame[28..32].copy_from_slice(&address.octets());
    frame[38..].copy_from_slice(&address.octets());
    frame
}

fn announce(name: &str, index: u32, address: Ipv4Addr) -> Result<(), Errno> {
    // Not one of Ethernet's: there is nobody to be told.
    let Some(mac) = mac_of(name) else { return Ok(()) };
    // SAFETY: takes numbers. Protocol 0: it receives nothing.
    let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    Errno::result(fd)?;
    // SAFETY: the kernel has just made this descriptor for us.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: a zeroed address is a valid one.
    let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    to.sll_family = u16::try_from(libc::AF_PACKET).map_err(|_| Errno::EINVAL)?;
    to.sll_ifindex = i32::try_from(index).map_err(|_| Errno::EINVAL)?;
    let frame = gratuitous_arp(mac, address);
    let size = u32::try_from(size_of::<libc::sockaddr_ll>()).map_err(|_| Errno::EINVAL)?;
    // SAFETY: frame and address live, and their lengths are told.
    let sent = unsafe {
        let (data, to) = (frame.as_ptr().cast(), (&raw const to).cast());
        libc::sendto(socket.as_raw_fd(), data, frame.len(), 0, to, size)
    };
    match Errno::result(sent) {
        // Without a cable there is nobody to be told, either.
        Ok(_) | Err(Errno::ENETDOWN) => Ok(()),
        Err(errno) => Err(errno),
    }
}

fn mac_of(name: &str) -> Option<[u8; 6]> {
    let text = fs::read_to_string(format!("/sys/class/net/{name}/address")).ok()?;
    let bytes = text.trim().split(':').map(|pair| u8::from_str_radix(pair, 16));
    bytes.collect::<Result<Vec<_>, _>>().ok()?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_announcement_is_a_request_for_the_own_address_to_all() {
        let mac = [2, 0, 0, 0, 0, 7];
        let frame = gratuitous_arp(mac, Ipv4Addr::new(192, 0, 2, 7));
        assert_eq!(frame[..14], [255, 255, 255, 255, 255, 255, 2, 0, 0, 0, 0, 7, 8, 6]);
        assert_eq!(frame[14..22], [0, 1, 8, 0, 6, 4, 0, 1]);
        assert_eq!((&frame[22..28], &frame[28..32]), (&mac[..], &[192, 0, 2, 7][..]));
        assert_eq!((&frame[32..38], &frame[38..]), (&[0; 6][..], &[192, 0, 2, 7][..]));
    }
}
