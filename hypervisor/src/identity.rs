//! What a restored guest becomes: another machine than the one that was saved.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::ValueEnum;
use devices::virtio::rng::host_entropy;
use guest_protocol::{Address, Configure, Interface, Neighbour, Renew};

/// What becomes of the guest's clocks. Its monotonic clock goes on from where it was either way, so
/// that no timer fires in a burst.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ClockPolicy {
    /// The time of day goes on from where it was, too: the guest does not notice
    Keep,
    /// The time of day becomes the host's, set by the agent
    #[default]
    Advance,
}

/// Why an identity is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// Not a host name.
    #[error("host name {0:?} is not 1 to 64 letters, digits, '-' or '.'")]
    Hostname(String),
    /// Not a machine id.
    #[error("machine id {0:?} is not 32 hexadecimal digits, not all of them zero")]
    MachineId(String),
    /// Not a description of an interface.
    #[error(
        "network {0:?} is not understood; write NAME=ADDRESS/BITS, and optionally further \
         ,ADDRESS/BITS ,gateway=ADDRESS and ,neighbour=ADDRESS@MAC"
    )]
    Network(String),
}

/// Who a restored guest shall be. What is absent stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Its clocks.
    pub clock: ClockPolicy,
    /// Its host name.
    pub hostname: Option<Hostname>,
    /// The content of its `/etc/machine-id`.
    pub machine_id: Option<MachineId>,
    /// Its network.
    pub network: Vec<GuestInterface>,
}

impl Identity {
    /// What the agent is told: fresh randomness, and the time as it is now.
    pub fn renew(&self) -> Renew {
        let mut entropy = vec![0; 64];
        if let Err(error) = host_entropy(&mut entropy) {
            tracing::warn!(%error, "no randomness for the restored guest");
            entropy.clear();
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).ok();
        let now = now.filter(|_| self.clock == ClockPolicy::Advance);
        Renew {
            unix_nanos: now.and_then(|now| u64::try_from(now.as_nanos()).ok()),
            entropy,
            hostname: self.hostname.as_ref().map(|name| name.0.clone()),
        }
    }

    /// What the agent is told after that, if anything.
    pub fn configure(&self) -> Option<Configure> {
        let configure = Configure {
            machine_id: self.machine_id.as_ref().map(|id| id.0.clone()),
            network: self.network.iter().map(|interface| interface.0.clone()).collect(),
        };
        (configure != Configure::default()).then_some(configure)
    }
}

/// A host name as Linux takes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hostname(String);

impl FromStr for Hostname {
    type Err = IdentityError;

    fn from_str(text: &str) -> Result<Self, IdentityError> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
        match (1..=64).contains(&text.len()) && text.chars().all(allowed) {
            true => Ok(Self(text.to_owned())),
            false => Err(IdentityError::Hostname(text.to_owned())),
        }
    }
}

/// A machine id (machine-id(5)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineId(String);

impl FromStr for MachineId {
    type Err = IdentityError;

    fn from_str(text: &str) -> Result<Self, IdentityError> {
        let id = text.to_ascii_lowercase();
        let is_one = id.len() == 32
            && id.bytes().all(|c| c.is_ascii_hexdigit())
            && id.bytes().any(|c| c != b'0');
        if is_one { Ok(Self(id)) } else { Err(IdentityError::MachineId(text.to_owned())) }
    }
}

/// An interface of the guest: `eth0=192.0.2.7/24,gateway=192.0.2.1,neighbour=192.0.2.1@02:…`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestInterface(Interface);

/// Longest name of an interface (IFNAMSIZ less its NUL).
const MAX_NAME: usize = 15;

impl FromStr for GuestInterface {
    type Err = IdentityError;

    fn from_str(text: &str) -> Result<Self, IdentityError> {
        let interface = parse_interface(text);
        interface.map(Self).ok_or_else(|| IdentityError::Network(text.to_owned()))
    }
}

impl fmt::Display for GuestInterface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.name)
    }
}

fn parse_interface(text: &str) -> Option<Interface> {
    let (name, rest) = text.split_once('=')?;
    let allowed = |c: char| c.is_ascii_graphic() && !"/:,@%".contains(c);
    if !(1..=MAX_NAME).contains(&name.len()) || !name.chars().all(allowed) {
        return None;
    }
    let mut interface = Interface { name: name.to_owned(), ..Interface::default() };
    for part in rest.split(',') {
        match part.split_once('=') {
            None => interface.addresses.push(parse_address(part)?),
            Some(("gateway", address)) => interface.gateways.push(address.parse().ok()?),
            Some(("neighbour", neighbour)) => {
                let (address, mac) = neighbour.split_once('@')?;
                let mac: devices::virtio::net::MacAddress = mac.parse().ok()?;
                let address = address.parse().ok()?;
                interface.neighbours.push(Neighbour { address, mac: mac.bytes() });
            }
            Some(_) => return None,
        }
    }
    // An interface without an address has nothing to say.
    (!interface.addresses.is_empty()).then_some(interface)
}

fn parse_address(text: &str) -> Option<Address> {
    let (address, bits) = text.split_once('/')?;
    let (address, bits): (IpAddr, u8) = (address.parse().ok()?, bits.parse().ok()?);
    let most = if address.is_ipv4() { 32 } else { 128 };
    (bits <= most).then_some(Address { address, bits })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_are_read() {
        let text = "eth0=192.0.2.7/24,2001:db8::7/64,gateway=192.0.2.1,gateway=fe80::1,\
                    neighbour=192.0.2.1@02:00:00:00:00:01";
        let GuestInterface(interface) = text.parse().unwrap();
        assert_eq!(interface.name, "eth0");
        assert_eq!(interface.addresses.len(), 2);
        assert_eq!(interface.addresses[1].bits, 64);
        assert_eq!(interface.gateways.len(), 2);
        assert_eq!(interface.neighbours[0].mac, [2, 0, 0, 0, 0, 1]);
    }

    #[test]
    fn what_is_no_network_is_refused() {
        for text in [
            "",
            "eth0",
            "eth0=",
            "=10.0.0.1/8",
            "eth0=10.0.0.1",
            "eth0=10.0.0.1/33",
            "eth0=10.0.0/8",
            "eth0=gateway=10.0.0.1",
            "eth0=10.0.0.1/8,gateway=x",
            "eth0=10.0.0.1/8,mtu=5",
            "eth0=10.0.0.1/8,neighbour=10.0.0.2",
            "a/b=10.0.0.1/8",
            "sixteencharacter=10.0.0.1/8",
        ] {
            let refusal = text.parse::<GuestInterface>().unwrap_err();
            assert_eq!(refusal, IdentityError::Network(text.to_owned()));
        }
    }

    #[test]
    fn names_and_machine_ids_are_checked() {
        assert!("a-1.example".parse::<Hostname>().is_ok());
        for text in ["", "a b", "a/b", &"a".repeat(65)] {
            assert!(text.parse::<Hostname>().is_err(), "{text:?}");
        }
        let id = "0123456789ABCDEF0123456789abcdef";
        assert_eq!(id.parse::<MachineId>().unwrap().0, id.to_lowercase());
        for text in ["", "0123", &"0".repeat(32), &"g".repeat(32), &"1".repeat(33)] {
            assert!(text.parse::<MachineId>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn the_time_is_told_only_where_it_shall_advance() {
        let advance = Identity::default();
        assert!(advance.renew().unix_nanos.is_some());
        let keep = Identity { clock: ClockPolicy::Keep, ..Identity::default() };
        let renew = keep.renew();
        assert_eq!((renew.unix_nanos, renew.entropy.len()), (None, 64));
        assert_ne!(renew.entropy, keep.renew().entropy);
    }
}
