use proptest::prelude::*;

use super::*;

const ALL: u64 = feature::CSUM
    | feature::HOST_TSO4
    | feature::HOST_TSO6
    | feature::HOST_ECN
    | feature::HOST_UFO
    | feature::GUEST_OFFLOADS;

/// Flags, kind, length of headers, segment size, start of the sum, its place.
fn header(flags: u8, kind: u8, words: [u16; 4]) -> Header {
    let [header_len, segment_size, start, offset] = words;
    Fields { flags, kind, header_len, segment_size, start, offset }.write(0)
}

const TCP: [u16; 4] = [54, 1448, 34, 16];

#[test]
fn what_makes_sense_is_passed_on_as_it_is() {
    for header in [
        header(0, 0, [0; 4]),
        header(1, 0, [0, 0, 34, 16]),
        header(1, gso::TCPV4, TCP),
        header(1, gso::TCPV6, [74, 1428, 54, 16]),
        header(1, gso::TCPV4 | gso::ECN, TCP),
        header(1, gso::UDP, [42, 1472, 34, 6]),
    ] {
        assert_eq!(outgoing(&header, 65_000, ALL), Ok(header));
    }
}

#[test]
fn what_has_no_meaning_is_not_passed_on() {
    let junk = [0xfe, 0, 9, 9, 9, 9, 9, 9, 9, 9, 0xff, 0xff];
    assert_eq!(outgoing(&junk, 60, ALL), Ok([0; 12]));
    let buffers = [1, 0, 0, 0, 0, 0, 34, 0, 16, 0, 7, 7];
    assert_eq!(outgoing(&buffers, 60, ALL), Ok([1, 0, 0, 0, 0, 0, 34, 0, 16, 0, 0, 0]));
}

#[test]
fn lengths_are_those_of_frames() {
    let plain = [0; 12];
    assert_eq!(outgoing(&plain, 0, ALL), Err(FrameFault::Short(0)));
    assert_eq!(outgoing(&plain, 13, ALL), Err(FrameFault::Short(13)));
    assert!(outgoing(&plain, 14, ALL).is_ok());
    assert!(outgoing(&plain, 65_550, ALL).is_ok());
    assert_eq!(outgoing(&plain, 65_551, ALL), Err(FrameFault::Long(65_551)));
    assert_eq!(outgoing(&plain, u64::MAX, ALL), Err(FrameFault::Long(u64::MAX)));
}

#[test]
fn a_checksum_lies_within_the_frame() {
    let sum = |start, offset| outgoing(&header(1, 0, [0, 0, start, offset]), 60, ALL);
    assert!(sum(34, 24).is_ok());
    assert!(sum(58, 0).is_ok());
    for (start, offset) in [(34, 25), (59, 0), (60, 0), (13, 0), (0, 0), (34, u16::MAX)] {
        assert_eq!(sum(start, offset), Err(FrameFault::Checksum { start, offset, len: 60 }));
    }
    assert!(sum(u16::MAX, u16::MAX).is_err());
}

#[test]
fn only_what_was_negotiated_is_allowed() {
    for (header, needed) in [
        (header(1, 0, [0, 0, 34, 16]), feature::CSUM),
        (header(1, gso::TCPV4, TCP), feature::HOST_TSO4),
        (header(1, gso::TCPV6, TCP), feature::HOST_TSO6),
        (header(1, gso::UDP, TCP), feature::HOST_UFO),
        (header(1, gso::TCPV4 | gso::ECN, TCP), feature::HOST_ECN),
    ] {
        assert!(outgoing(&header, 3000, ALL).is_ok());
        assert!(outgoing(&header, 3000, ALL & !needed).is_err());
    }
}

#[test]
fn segmentation_needs_a_size_and_a_checksum() {
    let none = header(1, gso::TCPV4, [54, 0, 34, 16]);
    assert_eq!(outgoing(&none, 3000, ALL), Err(FrameFault::Incomplete));
    let no_sum = header(0, gso::TCPV4, TCP);
    assert_eq!(outgoing(&no_sum, 3000, ALL), Err(FrameFault::Incomplete));
    let long = header(1, gso::TCPV4, [3001, 1448, 34, 16]);
    let fault = FrameFault::Headers { header: 3001, len: 3000 };
    assert_eq!(outgoing(&long, 3000, ALL), Err(fault));
}

#[test]
fn unknown_kinds_are_refused() {
    for kind in [2, 5, 6, 0x7f, gso::ECN, gso::ECN | gso::UDP, gso::ECN | 5, 0xff] {
        let result = outgoing(&header(1, kind, TCP), 3000, ALL);
        assert_eq!(result, Err(FrameFault::Segmentation(kind)));
    }
}

#[test]
fn the_guest_gets_what_it_takes_and_the_number_of_buffers() {
    let large = header(1, gso::TCPV4, TCP);
    let mut expected = large;
    expected[10] = 44;
    assert_eq!(incoming(&large, 44, ALL), Some(expected));
    assert_eq!(incoming(&large, 1, ALL & !feature::GUEST_TSO4), None);
    assert_eq!(incoming(&large, 1, 0), None);
    let ecn = header(1, gso::TCPV6 | gso::ECN, TCP);
    assert!(incoming(&ecn, 1, ALL).is_some());
    assert_eq!(incoming(&ecn, 1, ALL & !feature::GUEST_ECN), None);
    assert_eq!(incoming(&header(1, 5, TCP), 1, ALL), None);
}

#[test]
fn flags_are_only_for_guests_with_checksums() {
    let checked = header(2, 0, [0; 4]);
    assert_eq!(incoming(&checked, 1, ALL).map(|header| header[0]), Some(2));
    assert_eq!(incoming(&checked, 1, 0).map(|header| header[0]), Some(0));
    let unknown = header(0x84, 0, [0; 4]);
    assert_eq!(incoming(&unknown, 1, ALL).map(|header| header[0]), Some(0));
    assert_eq!(incoming(&header(1, 0, [0; 4]), 1, 0), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5000))]

    /// Whatever passes is within the frame and within what was negotiated.
    #[test]
    fn nothing_outside_of_the_frame_passes(
        mut bytes in any::<Header>(),
        kind in prop_oneof![Just(0_u8), Just(1), Just(3), Just(4), Just(0x81), any::<u8>()],
        start in prop_oneof![0_u16..100, any::<u16>()],
        len in prop_oneof![0_u64..200, 0_u64..70_000, any::<u64>()],
        features in any::<u64>(),
    ) {
        bytes[1] = kind;
        bytes[6..8].copy_from_slice(&start.to_le_bytes());
        if let Ok(passed) = outgoing(&bytes, len, features) {
            let fields = Fields::read(&passed);
            prop_assert!((14..=65_550).contains(&len));
            prop_assert_eq!(&passed[10..], &[0, 0]);
            prop_assert!(fields.flags <= 1);
            if fields.flags == 1 {
                prop_assert!(u64::from(fields.start) + u64::from(fields.offset) + 2 <= len);
                prop_assert!(features & feature::CSUM != 0);
            }
            if fields.kind != 0 {
                prop_assert!(u64::from(fields.header_len) <= len);
                prop_assert!(fields.segment_size > 0 && fields.flags == 1);
            }
            // Once more it says the same.
            prop_assert_eq!(outgoing(&passed, len, features), Ok(passed));
        }
    }

    #[test]
    fn incoming_headers_never_exceed_the_offloads(
        bytes in any::<Header>(), buffers in any::<u16>(), offloads in any::<u64>(),
    ) {
        if let Some(passed) = incoming(&bytes, buffers, offloads) {
            prop_assert_eq!(u16::from_le_bytes([passed[10], passed[11]]), buffers);
            prop_assert!(passed[0] == 0 || offloads & feature::GUEST_CSUM != 0);
        }
    }
}
