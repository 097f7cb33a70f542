//! Real TAPs: how they are opened, and why not.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Command, Stdio};

use super::host::{self, in_namespace};
use crate::virtio::net::{NetOption, Offloads, Tap, TapError};

/// A descriptor attached to the TAP or TUN `name` with `flags`.
fn attached(name: &str, flags: libc::c_int) -> OwnedFd {
    let file = OpenOptions::new().read(true).write(true).open("/dev/net/tun").unwrap();
    let mut request = host::request(name);
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    // SAFETY: the kernel reads and writes one ifreq.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &mut request) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    file.into()
}

const GOOD: libc::c_int = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;

fn refusal(result: Result<Vec<Tap>, TapError>) -> String {
    result.err().unwrap().to_string()
}

#[test]
fn what_does_not_exist_is_created_and_goes_away_again() {
    in_namespace(|| {
        let taps = Tap::open_named("cube0", 1, Some(1400)).unwrap();
        assert_eq!(taps[0].name(), "cube0");
        assert!(host::is_up("cube0"));
        assert_eq!(host::mtu("cube0"), 1400);
        assert!(taps[0].offloads().has(Offloads::CSUM.and(Offloads::TSO4).and(Offloads::TSO6)));
        drop(taps);
        assert_eq!(host::index("cube0"), None);
    });
}

#[test]
fn what_exists_is_left_as_it_is() {
    in_namespace(|| {
        let fd = attached("cube0", libc::IFF_TAP | libc::IFF_NO_PI);
        // SAFETY: takes a number.
        assert_eq!(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETPERSIST, 1_u64) }, 0);
        drop(fd);
        let taps = Tap::open_named("cube0", 1, Some(1400)).unwrap();
        assert!(!host::is_up("cube0"));
        assert_eq!(host::mtu("cube0"), 1500);
        drop(taps);
        assert!(host::index("cube0").is_some());
    });
}

#[test]
fn several_queues_are_several_descriptors_of_one_interface() {
    in_namespace(|| {
        let taps = Tap::open_named("several0", 3, None).unwrap();
        assert_eq!(taps.len(), 3);
        for tap in &taps {
            tap.set_attached(false).unwrap();
            tap.set_attached(false).unwrap();
            tap.set_attached(true).unwrap();
            tap.set_attached(true).unwrap();
        }
        // Others would only get a part of the frames.
        let error = refusal(Tap::open_named("several0", 2, None));
        assert!(error.contains("in use by another network card of this process"), "{error}");
    });
}

#[test]
fn one_queue_of_an_interface_that_can_have_several_is_enough() {
    in_namespace(|| {
        let first = attached("cube0", GOOD | libc::IFF_MULTI_QUEUE);
        let taps = Tap::open_named("cube0", 1, None).unwrap();
        assert_eq!(taps.len(), 1);
        drop(first);
    });
}

#[test]
fn an_interface_in_use_names_its_user() {
    in_namespace(|| {
        let taken = attached("busy0", GOOD);
        let error = refusal(Tap::open_named("busy0", 1, None));
        assert_eq!(
            error,
            "interface busy0 is in use by another network card of this process; stop that, or use \
             another interface"
        );
        let mut child = Command::new("sleep").arg("60").stdin(Stdio::from(taken)).spawn().unwrap();
        let error = refusal(Tap::open_named("busy0", 1, None));
        let expected = format!("in use by process {} (sleep)", child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(error.contains(&expected), "{error}");
    });
}

#[test]
fn more_queues_than_an_interface_has_are_refused_with_the_cure() {
    in_namespace(|| {
        let _single = attached("single1", GOOD);
        let error = refusal(Tap::open_named("single1", 2, None));
        assert!(error.contains("in use by") || error.contains("multi_queue"), "{error}");
        let fd = attached("single0", GOOD);
        // SAFETY: takes a number.
        assert_eq!(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETPERSIST, 1_u64) }, 0);
        drop(fd);
        let error = refusal(Tap::open_named("single0", 2, None));
        assert_eq!(
            error,
            "interface single0 has one queue, 2 were asked for; use queues=1, or make it anew: ip \
             tuntap add single0 mode tap multi_queue"
        );
    });
}

#[test]
fn interfaces_of_another_kind_are_refused() {
    in_namespace(|| {
        let error = refusal(Tap::open_named("lo", 1, None));
        assert!(
            error.contains("interface lo is an interface of another kind, not a TAP"),
            "{error}"
        );
        let _tun = attached("tun0", libc::IFF_TUN | libc::IFF_NO_PI);
        let error = refusal(Tap::open_named("tun0", 1, None));
        assert!(error.contains("interface tun0 is a TUN interface, not a TAP"), "{error}");
    });
}

#[test]
fn names_that_cannot_be_are_refused() {
    for name in ["", "sixteen-letters-", "a/b", "a b", "tap%d", "a:b", "n\u{fc}ll", "\n"] {
        let error = Tap::open_named(name, 1, None).err().unwrap();
        assert!(matches!(&error, TapError::Name(given) if given == name), "{error}");
        assert!(error.to_string().contains("1 to 15 characters"));
    }
    for queues in [0, 9] {
        assert!(matches!(Tap::open_named("tap0", queues, None), Err(TapError::Queues(_))));
    }
}

#[test]
fn without_the_capability_the_cure_is_named() {
    in_namespace(|| {
        host::drop_capability();
        let error = refusal(Tap::open_named("cube0", 1, None));
        assert_eq!(
            error,
            "interface cube0 may not be used by this process; run it with CAP_NET_ADMIN, or \
             prepare the interface for its user: ip tuntap add cube0 mode tap user NAME"
        );
    });
}

#[test]
fn a_descriptor_that_was_prepared_is_taken() {
    in_namespace(|| {
        let tap = Tap::from_fd(attached("cube0", GOOD)).unwrap();
        assert_eq!(tap.name(), "cube0");
        drop(tap);
        let fd = attached("cube1", GOOD | libc::IFF_MULTI_QUEUE);
        let number = fd.as_raw_fd();
        let option: NetOption = format!("fd={number}").parse().unwrap();
        let taps = option.open().unwrap();
        assert_eq!(taps[0].name(), "cube1");
        assert!(taps[0].set_attached(false).is_ok());
    });
}

#[test]
fn descriptors_of_something_else_are_refused_with_the_reason() {
    in_namespace(|| {
        let null: OwnedFd = File::open("/dev/null").unwrap().into();
        let error = Tap::from_fd(null).err().unwrap().to_string();
        assert!(error.contains("it is no descriptor of /dev/net/tun"), "{error}");
        let fresh = OpenOptions::new().read(true).write(true).open("/dev/net/tun").unwrap();
        let error = Tap::from_fd(fresh.into()).err().unwrap().to_string();
        assert!(error.contains("it is attached to no interface"), "{error}");
        for (flags, reason) in [
            (libc::IFF_TUN | libc::IFF_NO_PI | libc::IFF_VNET_HDR, "a TUN interface"),
            (libc::IFF_TAP | libc::IFF_NO_PI, "cube0 was attached without IFF_VNET_HDR"),
            (libc::IFF_TAP | libc::IFF_VNET_HDR, "cube0 was attached without IFF_NO_PI"),
        ] {
            let fd = attached("cube0", flags);
            let number = fd.as_raw_fd();
            let error = Tap::from_inherited(number).err().unwrap().to_string();
            assert!(error.contains(reason), "{error}");
            assert!(error.contains(&format!("descriptor {number} ")), "{error}");
        }
    });
}

#[test]
fn numbers_of_nothing_are_refused() {
    let error = Tap::from_inherited(1_000_000).err().unwrap();
    assert!(matches!(error, TapError::Closed(1_000_000)));
    assert!(Tap::from_inherited(-1).is_err());
    // And standard input is not closed by a try.
    let _ = Tap::from_inherited(0);
    // SAFETY: takes no pointer.
    let flags = unsafe { libc::fcntl(0, libc::F_GETFD) };
    assert!(flags >= 0);
}
