use proptest::prelude::*;

use super::*;

#[test]
fn commands_have_exactly_their_length() {
    let commands: [(&[u8], Command); 4] = [
        (&[1, 1, 2, 0, 0, 0, 0, 9], Command::SetMac(MacAddress::new([2, 0, 0, 0, 0, 9]).unwrap())),
        (&[3, 0], Command::Announced),
        (&[4, 0, 0x34, 0x12], Command::SetPairs(0x1234)),
        (&[5, 0, 0x82, 0, 0, 0, 0, 0, 0, 1], Command::SetOffloads(1 << 56 | 0x82)),
    ];
    for (bytes, command) in commands {
        assert_eq!(Command::parse(bytes), Some(command));
        assert_eq!(Command::parse(&bytes[..bytes.len() - 1]), None);
        assert_eq!(Command::parse(&[bytes, &[0]].concat()), None);
    }
}

#[test]
fn what_is_no_command_is_none() {
    let bad: [&[u8]; 9] = [
        &[],
        &[1],
        &[0, 0, 1],
        &[1, 0, 0, 0, 0, 0],
        &[2, 0, 0, 0],
        &[3, 1],
        &[4, 1, 1, 0],
        &[1, 1, 1, 0, 0, 0, 0, 9],
        &[1, 1, 0, 0, 0, 0, 0, 0],
    ];
    for bytes in bad {
        assert_eq!(Command::parse(bytes), None, "{bytes:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5000))]

    #[test]
    fn addresses_that_are_taken_are_those_of_cards(
        mut bytes in prop::collection::vec(any::<u8>(), 0..12), class in 0_u8..6,
    ) {
        if let Some(first) = bytes.first_mut() {
            *first = class;
        }
        if let Some(Command::SetMac(mac)) = Command::parse(&bytes) {
            prop_assert_eq!(mac.bytes()[0] & 1, 0);
            prop_assert_eq!(&mac.bytes()[..], &bytes[2..]);
        }
    }
}

#[test]
fn fuzz_net_control() {
    let corpus: [&[u8]; 4] =
        [&[1, 1, 2, 0, 0, 0, 0, 9], &[3, 0], &[4, 0, 2, 0], &[5, 0, 0x82, 0, 0, 0, 0, 0, 0, 0]];
    let corpus = corpus.map(<[u8]>::to_vec);
    crate::testing::fuzz("net control", &corpus, |input| match Command::parse(input) {
        Some(Command::SetMac(mac)) => {
            assert_eq!((mac.bytes()[0] & 1, input.len()), (0, 8));
            1
        }
        Some(Command::SetPairs(_)) => 2,
        Some(Command::SetOffloads(_)) => 3,
        Some(Command::Announced) => 4,
        None => 10 + input.len().min(12),
    });
}
