//! Tests of masks.

use super::*;
use proptest::collection::vec;
use proptest::prelude::*;

/// Returns true for each byte of an output that is compared.
fn compared(mask: &Mask, output: &[u8]) -> Vec<bool> {
    let mut cursor = MaskCursor::default();
    output
        .iter()
        .map(|byte| cursor.advance(mask, *byte))
        .collect()
}

/// Returns the ranges of an output that may differ.
fn masked_ranges(mask: &Mask, output: &[u8]) -> Vec<(usize, usize)> {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for (position, is_compared) in compared(mask, output).into_iter().enumerate() {
        match ranges.last_mut() {
            _ if is_compared => {}
            Some((_, end)) if *end == position => *end += 1,
            _ => ranges.push((position, position + 1)),
        }
    }
    ranges
}

fn mariadb_packet(thread: u32, salt: &[u8; 20]) -> Vec<u8> {
    let mut body = vec![10];
    body.extend_from_slice(b"5.5.5-10.11.6-MariaDB\0");
    body.extend_from_slice(&thread.to_le_bytes());
    body.extend_from_slice(&salt[..8]);
    body.push(0);
    body.extend_from_slice(&[0xfe, 0xf7, 45, 2, 0, 0xff, 0x81, 21]);
    body.extend_from_slice(&[0, 0, 0, 0, 0, 0, 0x1d, 0, 0, 0]);
    body.extend_from_slice(&salt[8..]);
    body.push(0);
    body.extend_from_slice(b"mysql_native_password\0");
    let mut packet = vec![body.len() as u8, 0, 0, 0];
    packet.extend(body);
    packet
}

fn postgresql_message(kind: u8, payload: &[u8]) -> Vec<u8> {
    let mut message = vec![kind];
    message.extend_from_slice(&(payload.len() as u32 + 4).to_be_bytes());
    message.extend_from_slice(payload);
    message
}

/// Returns a whole greeting, after a refusal of encryption.
fn postgresql_greeting(salt: u32, process: u32, key: u32) -> Vec<u8> {
    let salted = [5u32.to_be_bytes(), salt.to_be_bytes()].concat();
    let backend = [process.to_be_bytes(), key.to_be_bytes()].concat();
    [
        b"N".to_vec(),
        postgresql_message(b'R', &salted),
        postgresql_message(b'R', &0u32.to_be_bytes()),
        postgresql_message(b'S', b"server_version\x0015.4\0"),
        postgresql_message(b'K', &backend),
        postgresql_message(b'Z', b"I"),
    ]
    .concat()
}

#[test]
fn mariadb_servers_may_differ_in_thread_and_salt_alone() {
    let mask = Mask::mariadb_greeting();
    let one = mariadb_packet(17, b"abcdefghijklmnopqrst");
    let other = mariadb_packet(21, b"0123456789ABCDEFGHIJ");
    assert_eq!(mask.first_difference(&one, &other), None);
    let start = 4 + 1 + 22;
    assert_eq!(
        masked_ranges(&mask, &one),
        [(start, start + 12), (start + 31, start + 43)]
    );
    for position in (0..start)
        .chain(start + 12..start + 31)
        .chain(start + 43..one.len())
    {
        let mut changed = other.clone();
        changed[position] ^= 1;
        assert_eq!(mask.first_difference(&one, &changed), Some(position));
    }
}

#[test]
fn error_packet_in_place_of_a_greeting_is_compared() {
    let mask = Mask::mariadb_greeting();
    let packet = b"\x17\0\0\0\xff\x10\x04Too many connections of everybody here, and more text";
    assert!(masked_ranges(&mask, packet).is_empty());
}

#[test]
fn postgresql_servers_may_differ_in_salt_process_and_key_alone() {
    let mask = Mask::postgresql_greeting();
    let one = postgresql_greeting(1, 2, 3);
    let other = postgresql_greeting(0xffff_fff0, 0xffff_fff0, 0xffff_fff0);
    assert_eq!(mask.first_difference(&one, &other), None);
    let key_data = 1 + 13 + 9 + 5 + 20 + 5;
    assert_eq!(
        masked_ranges(&mask, &one),
        [(10, 14), (key_data, key_data + 8)]
    );
}

#[test]
fn other_authentication_is_a_difference() {
    let mask = Mask::postgresql_greeting();
    let one = postgresql_message(b'R', &[0; 4]);
    let mut other = one.clone();
    other[8] = 3;
    assert_eq!(mask.first_difference(&one, &other), Some(8));
}

#[test]
fn all_is_compared_after_the_greeting() {
    let mask = Mask::postgresql_greeting();
    let mut output = postgresql_greeting(1, 2, 3);
    let greeting = output.len();
    output.extend(postgresql_message(b'K', &[1; 8]));
    let ranges = masked_ranges(&mask, &output);
    assert!(ranges.iter().all(|(_, end)| *end <= greeting), "{ranges:?}");
}

#[test]
fn message_with_an_impossible_length_ends_the_steps() {
    let mask = Mask::postgresql_greeting();
    let output = [vec![b'K', 0, 0, 0, 3], postgresql_message(b'K', &[1; 8])].concat();
    assert!(masked_ranges(&mask, &output).is_empty());
}

#[test]
fn dates_of_each_answer_may_differ() {
    let mask = Mask::http_date();
    let answer =
        "HTTP/1.1 200 OK\r\nDate: Fri, 27 Nov 2026 10:00:00 GMT\r\nContent-Length: 0\r\n\r\n";
    let other = answer.replace("10:00:00", "10:00:01");
    let (two, others) = (answer.repeat(2), other.repeat(2));
    assert_eq!(
        mask.first_difference(two.as_bytes(), others.as_bytes()),
        None
    );
    let late = answer.replace("Length: 0", "Length: 1");
    assert_eq!(
        mask.first_difference(answer.as_bytes(), late.as_bytes()),
        answer.find("0\r\n\r\n")
    );
}

#[test]
fn overlapping_beginnings_of_a_pattern_are_found() {
    let pattern = MaskPattern {
        text: b"aab".to_vec(),
        masked: 1,
    };
    let mask = Mask::new(Vec::new(), vec![pattern]).expect("within the limits");
    assert_eq!(masked_ranges(&mask, b"aaab?aab?aab"), [(4, 5), (8, 9)]);
}

#[test]
fn lists_beyond_the_limits_are_refused() {
    let steps = vec![MaskStep::Compared { bytes: 1 }; STEPS_MAX + 1];
    assert_eq!(
        Mask::new(steps, Vec::new()),
        Err(MaskError::Steps(STEPS_MAX + 1))
    );
    let pattern = |length| MaskPattern {
        text: vec![b'a'; length],
        masked: 1,
    };
    for length in [0, PATTERN_BYTES_MAX + 1] {
        assert_eq!(
            Mask::new(Vec::new(), vec![pattern(length)]),
            Err(MaskError::PatternLength(length))
        );
    }
    assert_eq!(
        Mask::new(Vec::new(), vec![pattern(1); PATTERNS_MAX + 1]),
        Err(MaskError::Patterns(PATTERNS_MAX + 1))
    );
}

#[test]
fn masked_byte_cannot_end_a_run() {
    let after_run = |step| Mask::new(vec![MaskStep::RunOf { byte: 1 }, step], Vec::new());
    for step in [
        MaskStep::Masked { bytes: 1 },
        MaskStep::Compared { bytes: 0 },
    ] {
        assert_eq!(after_run(step), Err(MaskError::MaskedAfterRun));
    }
    assert!(after_run(MaskStep::Compared { bytes: 1 }).is_ok());
}

#[test]
fn built_in_masks_have_names() {
    for name in ["none", "mariadb-greeting", "postgresql-greeting"] {
        assert!(Mask::by_name(name).is_some(), "{name}");
    }
    assert_ne!(Mask::by_name("http-date"), Some(Mask::default()));
    assert_eq!(Mask::by_name("no-mask"), None);
}

fn step() -> impl Strategy<Value = MaskStep> {
    let small = any::<u8>().prop_map(|byte| byte % 4);
    let message =
        (small.clone(), 0u32..4).prop_map(|(kind, compared)| VaryingMessageType { kind, compared });
    prop_oneof![
        (0u32..5).prop_map(|bytes| MaskStep::Compared { bytes }),
        (0u32..5).prop_map(|bytes| MaskStep::Masked { bytes }),
        small.clone().prop_map(|byte| MaskStep::Expected { byte }),
        small.clone().prop_map(|byte| MaskStep::Through { byte }),
        small.clone().prop_map(|byte| MaskStep::RunOf { byte }),
        (vec(message, 0..3), small).prop_map(|(masked, last)| MaskStep::Messages { masked, last }),
    ]
}

fn mask() -> impl Strategy<Value = Mask> {
    let text = vec(any::<u8>().prop_map(|byte| byte % 3), 1..5);
    let pattern = (text, 0u32..5).prop_map(|(text, masked)| MaskPattern { text, masked });
    (vec(step(), 0..STEPS_MAX), vec(pattern, 0..PATTERNS_MAX))
        .prop_filter_map("a mask after a run", |(steps, patterns)| {
            Mask::new(steps, patterns).ok()
        })
}

proptest! {
    /// Masked bytes do not decide where the masked bytes are, and a change of a compared byte is found.
    #[test]
    fn legs_agree_on_the_masked_positions(
        mask in mask(),
        output in vec(any::<u8>().prop_map(|byte| byte % 8), 0..80),
        noise in vec(any::<u8>(), 80),
        changed in 0usize..80,
    ) {
        let is_compared = compared(&mask, &output);
        let other: Vec<u8> = output.iter().zip(&noise).zip(&is_compared)
            .map(|((byte, noise), compared)| if *compared { *byte } else { *noise })
            .collect();
        prop_assert_eq!(&compared(&mask, &other), &is_compared);
        prop_assert_eq!(mask.first_difference(&output, &other), None);
        if is_compared.get(changed) == Some(&true) {
            let mut wrong = other.clone();
            wrong[changed] ^= 0x80;
            prop_assert_eq!(mask.first_difference(&output, &wrong), Some(changed));
        }
    }

    #[test]
    fn pattern_matches_where_a_search_finds_it(
        text in vec(any::<bool>(), 1..6),
        output in vec(any::<bool>(), 0..60),
    ) {
        let bytes = |bits: &[bool]| bits.iter().map(|bit| u8::from(*bit)).collect::<Vec<u8>>();
        let (text, output) = (bytes(&text), bytes(&output));
        let pattern = MaskPattern { text: text.clone(), masked: 1 };
        let mask = Mask::new(Vec::new(), vec![pattern]).expect("within the limits");
        let mut expected = vec![true; output.len()];
        let mut from = 0;
        while let Some(found) = output.get(from..).and_then(|rest| {
            rest.windows(text.len()).position(|window| window == text)
        }) {
            let masked = from + found + text.len();
            if let Some(compared) = expected.get_mut(masked) {
                *compared = false;
            }
            from = masked + 1;
        }
        prop_assert_eq!(compared(&mask, &output), expected);
    }
}
