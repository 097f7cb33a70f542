use proptest::prelude::*;

use super::*;

fn option(text: &str) -> Result<NetOption, String> {
    text.parse().map_err(|error: NetOptionError| error.to_string())
}

#[test]
fn an_option_with_everything_is_read() {
    let card = option(
        "tap=tap0,mac=02:00:00:00:00:2a,mtu=9000,id=lan,queues=4,rx_bytes=10M/s,\
         rx_frames=1000/100ms,tx_bytes=1M/s+5M,tx_frames=9/s",
    )
    .unwrap();
    assert_eq!(card.source, NetSource::Tap("tap0".to_owned()));
    assert_eq!(card.mac.unwrap().bytes(), [2, 0, 0, 0, 0, 0x2a]);
    assert_eq!((card.mtu, card.queues, card.id.as_str()), (Some(9000), Some(4), "lan"));
    assert_eq!(card.rx.bytes, Some("10M/s".parse().unwrap()));
    assert_eq!(card.rx.operations, Some("1000/100ms".parse().unwrap()));
    assert_eq!(card.tx.bytes, Some("1M/s+5M".parse().unwrap()));
    assert_eq!(card.tx.operations, Some("9/s".parse().unwrap()));
    let config = card.config(DeviceId::new("net1"));
    assert_eq!((config.mac, config.mtu, config.rx), (card.mac, card.mtu, card.rx));
}

#[test]
fn an_option_with_nothing_special_is_read() {
    assert_eq!(option("tap=tap0"), Ok(NetOption::tap("tap0")));
    assert_eq!(option("fd=3").unwrap().source, NetSource::Fd(vec![3]));
    let two = option("fd=3:7,queues=2").unwrap();
    assert_eq!((two.source, two.queues), (NetSource::Fd(vec![3, 7]), Some(2)));
    assert_eq!(option("fd=3:7").unwrap().queues, None);
}

#[test]
fn who_moves_the_frames_is_read() {
    let kernel = option("tap=tap0,vhost=on").unwrap();
    assert!(kernel.vhost && kernel.backend().is_none());
    assert!(!option("tap=tap0,vhost=off,rx_bytes=5/s").unwrap().vhost);
    let far = option("vhost-user=/run/net.sock,queues=2,mac=02:00:00:00:00:01").unwrap();
    assert_eq!((far.backend(), far.queues), (Some("/run/net.sock".as_ref()), Some(2)));
    assert!(far.open().unwrap().is_empty());
    for card in [NetOption::tap("tap0"), kernel, far] {
        let mut bytes = Vec::new();
        ciborium::into_writer(&card, &mut bytes).unwrap();
        assert_eq!(ciborium::from_reader::<NetOption, _>(&*bytes).unwrap(), card);
    }
}

#[test]
fn bad_options_name_the_value_and_the_cure() {
    for (text, expected) in [
        ("", "network option \"\" is not known"),
        ("tap", "network option \"tap\" is not known; use tap=NAME, fd=N or vhost-user="),
        ("tap=", "network option \"tap=\" is not known"),
        ("tap=t,speed=10", "network option \"speed=10\" is not known"),
        ("tap=t,", "network option \"\" is not known"),
        ("mtu=1500", "network card \"mtu=1500\" needs one of tap=NAME, fd=N and vhost-user="),
        ("tap=t,fd=3", "network card \"tap=t,fd=3\" needs one of tap=NAME, fd=N and vhost-user="),
        ("tap=t,mtu=1500,mtu=1500", "network option mtu= is given twice"),
        ("tap=t,tap=u", "network option tap= is given twice"),
        ("tap=t,mtu=67", "network option mtu=67 is not a number from 68 to 65535"),
        ("tap=t,mtu=65536", "network option mtu=65536 is not a number from 68 to 65535"),
        ("tap=t,mtu=x", "network option mtu=x is not a number"),
        ("tap=t,queues=0", "network option queues=0 is not a number from 1 to 8"),
        ("tap=t,queues=9", "network option queues=9 is not a number from 1 to 8"),
        ("fd=-1", "network option fd=-1 is not a number from 0 to 2147483647"),
        ("fd=3:", "network option fd= is not a number"),
        ("fd=2147483648", "network option fd=2147483648 is not a number"),
        ("fd=3,queues=2", "fd= has 1 descriptors for queues=2; give one per queue pair"),
        ("fd=1:2:3:4:5:6:7:8:9", "fd= has 9 descriptors for queues=8"),
        ("tap=t,id=a b", "network card id \"a b\" is not 1 to 20 letters"),
        ("tap=t,id=abcdefghijklmnopqrstu", "network card id \"abcdefghijklmnopqrstu\""),
        ("tap=t,mac=1", "MAC address \"1\" is not of the form 02:00:00:00:00:01"),
        ("tap=t,mac=01:00:00:00:00:01", "MAC address 01:00:00:00:00:01 is a group address"),
        ("tap=t,rx_bytes=5", "rate \"5\" is not AMOUNT/PERIOD"),
        ("tap=t,vhost=yes", "network option vhost=\"yes\" is neither on nor off"),
        ("tap=t,vhost", "network option \"vhost\" is not known"),
        ("tap=t,vhost-user=s", "needs one of tap=NAME, fd=N and vhost-user=SOCKET"),
        ("vhost-user=s,vhost=on", "vhost=on is for tap= and fd=; leave it out"),
        ("vhost-user=s,rx_bytes=5/s", "rx_bytes= cannot be beside vhost-user=: the frames do not"),
        ("tap=t,vhost=on,rx_frames=5/s", "rx_frames= cannot be beside vhost=on"),
        ("tap=t,tx_bytes=5/s,vhost=on", "tx_bytes= cannot be beside vhost=on"),
        ("fd=3,vhost=on,tx_frames=5/s", "tx_frames= cannot be beside vhost=on"),
    ] {
        let error = option(text).unwrap_err();
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn addresses_are_read_and_written() {
    let mac: MacAddress = "AA:bb:0c:00:01:fe".parse().unwrap();
    assert_eq!(mac.to_string(), "aa:bb:0c:00:01:fe");
    for bad in [
        "",
        "02:00:00:00:00",
        "02:00:00:00:00:01:02",
        "02-00-00-00-00-01",
        "2:0:0:0:0:1",
        "+2:00:00:00:00:01",
        "0\u{e9}:00:00:00:00:01",
        "02:00:00:00:00:0g",
    ] {
        assert_eq!(bad.parse::<MacAddress>(), Err(MacError::Format(bad.to_owned())));
    }
    for bad in ["00:00:00:00:00:00", "ff:ff:ff:ff:ff:ff", "33:33:00:00:00:01"] {
        assert_eq!(bad.parse::<MacAddress>(), Err(MacError::NotUnicast(bad.to_owned())));
    }
}

#[test]
fn derived_addresses_are_local_and_differ_where_the_names_do() {
    let names = [["net0", "tap0"], ["net1", "tap0"], ["net0", "tap1"], ["net0t", "ap0"]];
    let derived: Vec<_> = names.iter().map(|names| MacAddress::derived(names)).collect();
    for (place, mac) in derived.iter().enumerate() {
        assert_eq!(mac.bytes()[0] & 3, 2, "{mac} is not a local unicast address");
        assert_eq!(*mac, MacAddress::derived(&names[place]));
        assert!(!derived[..place].contains(mac));
    }
}

#[test]
fn cards_outside_of_text_are_checked_too() {
    let mut card = NetOption::tap("tap0");
    assert_eq!(card.validate(), Ok(()));
    card.mtu = Some(10);
    assert!(card.validate().is_err());
    let mut card = NetOption::tap("tap0");
    card.queues = Some(9);
    assert!(card.validate().is_err());
    card.queues = None;
    card.source = NetSource::Fd(Vec::new());
    assert!(card.validate().is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_text_is_read_into_nonsense(text in "(tap|fd|mac|mtu|queues|id|rx_bytes|vhost|vhost-user)=[0-9a-f:/+=,sM]{0,20}") {
        if let Ok(card) = text.parse::<NetOption>() {
            prop_assert_eq!(card.validate(), Ok(()));
        }
    }

    #[test]
    fn no_text_at_all_panics(text in ".{0,60}") {
        let _ = text.parse::<NetOption>();
        let _ = text.parse::<MacAddress>();
    }
}
