//! Wireshark's dissectors, an independent implementation, find no fault in the encoded messages.

use crate::codec::Message;
use crate::strategies::message;
use bytes::Bytes;
use crc::{CRC_32_ISCSI, Crc};
use etherparse::{IpNumber, Ipv4Header};
use holdfast_wire::rserpool::{CauseCode, ErrorCause, PolicyKind, asap};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use std::collections::BTreeSet;
use std::process::Command;

const LINKTYPE_RAW: u32 = 101;

/// An SCTP packet with one DATA chunk (RFC 9260 sections 3 and 3.3.1), in IPv4.
fn packet(message: &Message, tsn: u32) -> Vec<u8> {
    let payload = message.encode().expect("a message");
    let mut sctp = [message.port().to_be_bytes(), message.port().to_be_bytes()].concat();
    // Verification tag; checksum, below.
    sctp.extend([0, 0, 0, 1, 0, 0, 0, 0]);
    let length = u16::try_from(16 + payload.len()).expect("short");
    // DATA, the only fragment.
    sctp.extend([0, 3]);
    sctp.extend(length.to_be_bytes());
    sctp.extend(tsn.to_be_bytes());
    // Stream, and sequence number in it.
    sctp.extend([0; 4]);
    sctp.extend(message.ppid().to_be_bytes());
    sctp.extend(&payload);
    let checksum = Crc::<u32>::new(&CRC_32_ISCSI).checksum(&sctp);
    sctp[8..12].copy_from_slice(&checksum.to_le_bytes());

    let length = u16::try_from(sctp.len()).expect("short");
    let (from, to) = ([10, 0, 0, 1], [10, 0, 0, 2]);
    let ip = Ipv4Header::new(length, 64, IpNumber::SCTP, from, to).expect("short");
    let mut packet = ip.to_bytes().to_vec();
    packet.extend(sctp);
    packet
}

/// A capture in the classic format, times all 0.
fn capture_bytes(packets: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let header = [0xa1b2_c3d4, 0x0002_0004, 0, 0, 0x0004_0000, LINKTYPE_RAW];
    bytes.extend(header.iter().flat_map(|word: &u32| word.to_be_bytes()));
    for packet in packets {
        let length = u32::try_from(packet.len()).expect("short");
        let record = [0, 0, length, length];
        bytes.extend(record.iter().flat_map(|word| word.to_be_bytes()));
        bytes.extend(packet);
    }
    bytes
}

/// Returns one line per packet: message type, checksum validity (1 if right), malformed parts or warnings.
fn dissect(packets: &[Vec<u8>]) -> Vec<String> {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), capture_bytes(packets)).expect("written");
    let mut tshark = Command::new("tshark");
    tshark.args([
        "-n",
        "-o",
        "sctp.checksum:CRC-32C",
        "-T",
        "fields",
        "-E",
        "separator=,",
        "-E",
        "occurrence=f",
    ]);
    for field in [
        "asap.message_type",
        "enrp.message_type",
        "sctp.checksum.status",
        "_ws.malformed",
        "_ws.expert.message",
    ] {
        tshark.args(["-e", field]);
    }
    let output = tshark
        .arg("-r")
        .arg(file.path())
        .output()
        .expect("tshark, which ./x setup installs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let text = String::from_utf8(output.stdout).expect("text");
    text.lines().map(str::to_owned).collect()
}

/// Returns messages of every kind, with optional parts, and causes with their data.
fn messages() -> Vec<Message> {
    let mut runner = TestRunner::deterministic();
    let any = message();
    let mut new = |_| any.new_tree(&mut runner).expect("a message").current();
    let mut messages: Vec<_> = (0..500).map(&mut new).collect();
    let parameter = ErrorCause::inconsistent_policy(&PolicyKind::LeastUsedDpf.zeroed()).data;
    let whole = new(0).encode().expect("small");
    for (code, data) in [
        (CauseCode::UNRECOGNIZED_PARAMETER, &parameter),
        (CauseCode::UNRECOGNIZED_MESSAGE, &whole),
        (CauseCode::INVALID_VALUES, &parameter),
        (CauseCode::UNKNOWN_POOL_HANDLE, &Bytes::new()),
    ] {
        let data = data.clone();
        messages.push(Message::Asap(asap::Message::Error(vec![ErrorCause {
            code,
            data,
        }])));
    }
    messages
}

#[test]
fn wireshark_accepts_encoded_messages() {
    if Command::new("tshark").arg("--version").output().is_err() {
        eprintln!("skipped: tshark is not installed");
        return;
    }
    let messages = messages();
    let packets: Vec<_> = (0..)
        .zip(&messages)
        .map(|(tsn, message)| packet(message, tsn))
        .collect();
    let lines = dissect(&packets);
    assert_eq!(lines.len(), messages.len());
    let mut kinds = BTreeSet::new();
    for (message, line) in messages.iter().zip(&lines) {
        let number = message.encode().expect("small")[0];
        kinds.insert((message.ppid(), number));
        let expected = match message {
            Message::Asap(_) => format!("{number},,1,,"),
            Message::Enrp(_) => format!(",{number},1,,"),
        };
        assert_eq!(*line, expected, "{message:?}");
    }
    assert_eq!(kinds.len(), 14 + 2 + 10, "every kind");
}

/// A control test: the dissectors report a message that is cut short and has a wrong checksum.
#[test]
fn wireshark_reports_malformed_messages() {
    if Command::new("tshark").arg("--version").output().is_err() {
        eprintln!("skipped: tshark is not installed");
        return;
    }
    let short = ErrorCause {
        code: CauseCode::INCONSISTENT_POLICY,
        data: Bytes::new(),
    };
    let malformed = packet(&Message::Asap(asap::Message::Error(vec![short])), 0);
    let mut damaged = packet(&Message::Asap(asap::Message::Cookie(Bytes::new())), 1);
    damaged[28] ^= 1;
    let lines = dissect(&[malformed, damaged]);
    assert!(lines[0].contains("Malformed"), "{}", lines[0]);
    assert!(lines[1].contains(",0,,Bad SCTP checksum"), "{}", lines[1]);
}

/// Runs `scripts/captures.sh`, with which `./x test` checks its captures, on these folders; returns its verdict and
/// output.
fn run_capture_check(captures: &[(&str, Vec<Vec<u8>>)]) -> (bool, String) {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, packets) in captures {
        std::fs::write(folder.path().join(name), capture_bytes(packets)).expect("written");
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/captures.sh");
    let output = Command::new(script)
        .arg("check")
        .arg(folder.path())
        .output();
    let output = output.expect("bash runs the script");
    let output_text = [output.stdout, output.stderr].concat();
    let output_text = String::from_utf8(output_text).expect("text");
    (output.status.success(), output_text)
}

#[test]
fn capture_check_reports_malformed_and_missing() {
    if Command::new("tshark").arg("--version").output().is_err() {
        eprintln!("skipped: tshark is not installed");
        return;
    }
    let all = messages();
    let packets_of = |wanted: fn(&Message) -> bool| -> Vec<_> {
        let wanted = all.iter().filter(|message| wanted(message)).take(5);
        (0..).zip(wanted).map(|(tsn, m)| packet(m, tsn)).collect()
    };
    let asap = packets_of(|message| matches!(message, Message::Asap(_)));
    let enrp = packets_of(|message| matches!(message, Message::Enrp(_)));
    // One capture for each test program that the script lists, and one for a host of a lab.
    let mut valid_captures: Vec<(&str, Vec<_>)> = [
        "rserpoold-registrar.pcap",
        "rserpoold-pool.pcap",
        "bench-registrar.pcap",
        "bench-sessions.pcap",
        "bench-pool_commands.pcap",
        "bench-pool_distances.pcap",
    ]
    .map(|name| (name, asap.clone()))
    .into();
    assert!(!run_capture_check(&valid_captures).0, "no ENRP");
    valid_captures.push(("bench-sessions@lab.n1.pcap", enrp.clone()));
    let (content, report) = run_capture_check(&valid_captures);
    assert!(content, "{report}");
    let summary = "35 packets, 30 ASAP and 5 ENRP messages, 0 packets malformed";
    assert!(report.contains(summary), "{report}");
    for (index, name) in ["rserpoold-registrar", "rserpoold-pool", "bench-registrar"]
        .iter()
        .enumerate()
    {
        let mut others = valid_captures.clone();
        others[index].1 = enrp.clone();
        let (content, output_text) = run_capture_check(&others);
        assert!(!content && output_text.contains(name), "{output_text}");
        others.remove(index);
        assert!(!run_capture_check(&others).0, "passed without {name}");
    }
    assert!(!run_capture_check(&[]).0, "nothing");
    let mut damaged = asap[0].clone();
    damaged[28] ^= 1;
    let short = ErrorCause {
        code: CauseCode::INCONSISTENT_POLICY,
        data: Bytes::new(),
    };
    let short = packet(&Message::Asap(asap::Message::Error(vec![short])), 9);
    for bad in [damaged, short] {
        let mut all = valid_captures.clone();
        all.push(("rserpoold-pool@c.pcap", vec![bad]));
        let (content, output_text) = run_capture_check(&all);
        assert!(!content, "{output_text}");
        assert!(
            output_text.contains("rserpoold-pool@c, packet 1"),
            "{output_text}"
        );
    }
}
