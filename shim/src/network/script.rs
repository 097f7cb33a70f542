//! What a shell in the guest has to do for the guest to have its pod's network.

use super::{Card, Neighbour, Network};

impl Network {
    /// What a shell in the guest has to do. Cards are found by their hardware addresses, since the
    /// guest's kernel names them in its own order.
    pub fn script(&self) -> String {
        let mut lines = vec!["set -e".to_owned(), "ip link set lo up".to_owned()];
        if self.waits() {
            return lines.join("\n");
        }
        for (number, card) in self.cards.iter().enumerate() {
            // First names that are nobody's, since two cards may have to change theirs.
            lines.push(format!(
                "for f in /sys/class/net/*; do if [ \"$(cat $f/address)\" = {} ]; then \
                 ip link set ${{f##*/}} down; ip link set ${{f##*/}} name cubetmp{number}; fi; done",
                card.mac
            ));
        }
        for (number, card) in self.cards.iter().enumerate() {
            lines.push(format!("ip link set cubetmp{number} name {}", card.name));
            lines.extend(card.set_up());
        }
        self.reach(&mut lines);
        lines.join("\n")
    }

    /// What a shell in the guest has to do whose cards had other addresses until now: that of a copy,
    /// or of a VM that was there before its network.
    pub fn renewal(&self) -> String {
        let mut lines = vec!["set -e".to_owned()];
        for card in &self.cards {
            let Card { name, mac, .. } = card;
            // Routes and neighbours go with the card's being up.
            lines.push(format!("ip link set {name} down; ip addr flush dev {name}"));
            lines.push(format!("ip neigh flush dev {name}; ip link set {name} address {mac}"));
            if !self.waits() {
                lines.extend(card.set_up());
            }
        }
        self.reach(&mut lines);
        lines.join("\n")
    }

    /// How others are reached.
    fn reach(&self, lines: &mut Vec<String>) {
        for route in &self.routes {
            let family = if route.v6 { "-6 " } else { "" };
            let to = match route.to {
                Some((to, prefix)) => format!("{to}/{prefix}"),
                None => "default".to_owned(),
            };
            let via = route.gateway.map_or_else(String::new, |gateway| format!(" via {gateway}"));
            lines.push(format!("ip {family}route replace {to}{via} dev {}", route.card));
        }
        for Neighbour { address, mac, card } in &self.neighbours {
            lines.push(format!("ip neigh replace {address} lladdr {mac} dev {card} nud permanent"));
        }
    }
}

impl Card {
    fn set_up(&self) -> Vec<String> {
        let Self { name, mtu, .. } = self;
        let up = format!("ip link set {name} mtu {mtu} up");
        let addresses = self.addresses.iter().map(|(address, prefix)| {
            // The plugin has made sure that nobody else has it.
            let sure = if address.is_ipv6() { " nodad" } else { "" };
            format!("ip addr add {address}/{prefix} dev {name}{sure} || true")
        });
        std::iter::once(up).chain(addresses).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::super::{Own, Route};
    use super::*;

    fn network() -> Network {
        let tap = File::open("/dev/null").unwrap().into();
        Network {
            cards: vec![Card {
                name: "eth0".to_owned(),
                mac: "02:00:00:00:00:07".to_owned(),
                mtu: 1450,
                addresses: vec![("10.1.0.5".parse().unwrap(), 24)],
                tap,
            }],
            routes: vec![Route {
                to: None,
                gateway: Some("10.1.0.1".parse().unwrap()),
                card: "eth0".to_owned(),
                v6: false,
            }],
            ..Network::default()
        }
    }

    #[test]
    fn the_guest_is_given_what_the_pod_has() {
        let script = network().script();
        for line in [
            "ip link set cubetmp0 name eth0",
            "ip link set eth0 mtu 1450 up",
            "ip addr add 10.1.0.5/24 dev eth0 || true",
            "ip route replace default via 10.1.0.1 dev eth0",
        ] {
            assert!(script.lines().any(|each| each == line), "{line} is not in {script}");
        }
    }

    #[test]
    fn a_card_that_waits_for_its_network_is_left_alone_until_it_comes() {
        let mut network = network();
        let namespace = || File::open("/proc/thread-self/ns/net").unwrap();
        network.own = Some(Own { namespace: namespace(), in_use: false });
        assert!(!network.script().contains("eth0"), "{}", network.script());
        assert!(!network.renewal().contains(" up"), "{}", network.renewal());
        network.own = Some(Own { namespace: namespace(), in_use: true });
        let renewal = network.renewal();
        let lines: Vec<_> = renewal.lines().collect();
        let at = |end: &str| lines.iter().position(|line| line.ends_with(end)).unwrap();
        assert!(at("address 02:00:00:00:00:07") < at("mtu 1450 up"), "{renewal}");
    }
}
