//! Made-up captures, and what is said about them.

use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use etherparse::{PacketBuilder, TcpOptionElement};

use super::*;

const CLIENT: &str = "10.0.0.2:5000";
const SERVER: &str = "10.0.0.1:80";
const SYN: u8 = 1;
const FIN: u8 = 2;
const RST: u8 = 4;

/// A capture in the making: times in microseconds, sequence numbers relative to each side's first data byte.
struct Story {
    file: Vec<u8>,
    now_us: u64,
    server_isn: u32,
    family6: bool,
    clock: Option<u32>,
}

impl Story {
    fn new() -> Self {
        let header = [0xa1b2_3c4d, 0x0004_0002, 0, 0, 128, 1u32];
        let file = header.iter().flat_map(|word| word.to_le_bytes()).collect();
        // Its data passes the wrap of sequence numbers soon.
        Self {
            file,
            now_us: 1_000_000,
            server_isn: u32::MAX - 2000,
            family6: false,
            clock: None,
        }
    }

    fn opened() -> Self {
        let mut story = Self::new();
        story.client(0, SYN, u32::MAX, 0, 0);
        story.server(100, SYN, u32::MAX, 0, 0);
        story.client(100, 0, 0, 0, 0);
        story
    }

    fn client(
        &mut self,
        after_us: u64,
        flags: u8,
        sequence: u32,
        acknowledges: u32,
        length: u32,
    ) -> &mut Self {
        let (sequence, acknowledges) = (
            1000u32.wrapping_add(sequence),
            self.server_isn.wrapping_add(acknowledges),
        );
        self.segment(after_us, true, flags, sequence, acknowledges, 500, length)
    }

    fn server(
        &mut self,
        after_us: u64,
        flags: u8,
        sequence: u32,
        acknowledges: u32,
        length: u32,
    ) -> &mut Self {
        let (sequence, acknowledges) = (
            self.server_isn.wrapping_add(sequence),
            1000u32.wrapping_add(acknowledges),
        );
        self.segment(after_us, false, flags, sequence, acknowledges, 500, length)
    }

    #[allow(clippy::too_many_arguments)]
    fn segment(
        &mut self,
        after_us: u64,
        by_client: bool,
        flags: u8,
        sequence: u32,
        acknowledges: u32,
        window: u16,
        length: u32,
    ) -> &mut Self {
        let (from, to) = if by_client { (2, 1) } else { (1, 2) };
        let ports = if by_client { (5000, 80) } else { (80, 5000) };
        let link = PacketBuilder::ethernet2([2, 0, 0, 0, 0, from], [2, 0, 0, 0, 0, to]);
        let mut long = [0; 16];
        long[0] = 0xfd;
        let ends = [from, to].map(|end| {
            let mut address = long;
            address[15] = end;
            address
        });
        let ip = match self.family6 {
            true => link.ipv6(ends[0], ends[1], 64),
            false => link.ipv4([10, 0, 0, from], [10, 0, 0, to], 64),
        };
        let mut tcp = ip.tcp(ports.0, ports.1, sequence, window);
        if flags & SYN != 0 {
            tcp = tcp.syn();
        }
        if flags & FIN != 0 {
            tcp = tcp.fin();
        }
        if flags & RST != 0 {
            tcp = tcp.rst();
        }
        if flags & SYN == 0 || !by_client {
            tcp = tcp.ack(acknowledges);
        }
        if let Some(clock) = self.clock {
            tcp = tcp
                .options(&[TcpOptionElement::Timestamp(clock, 0)])
                .unwrap();
        }
        let mut packet = Vec::new();
        tcp.write(&mut packet, &vec![7; length as usize]).unwrap();
        self.now_us += after_us;
        let kept = packet.len().min(128) as u32;
        let seconds = (self.now_us / 1_000_000) as u32;
        let nanoseconds = (self.now_us % 1_000_000) as u32 * 1000;
        for word in [seconds, nanoseconds, kept, packet.len() as u32] {
            self.file.extend(word.to_le_bytes());
        }
        self.file.extend(&packet[..kept as usize]);
        self
    }

    fn file(&self) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&self.file).unwrap();
        file
    }

    fn connection(&self) -> Connection {
        let mut all = analyse(&segments(self.file().path()).unwrap());
        assert_eq!(all.len(), 1);
        all.remove(0)
    }
}

#[test]
fn an_undisturbed_connection_has_nothing_to_tell() {
    let mut story = Story::opened();
    story.client(50, 0, 0, 0, 100);
    for part in 0..4 {
        story
            .server(700, 0, part * 1000, 100, 1000)
            .client(10, 0, 100, part * 1000 + 1000, 0);
    }
    story
        .server(10, FIN, 4000, 100, 0)
        .client(10, FIN, 100, 4001, 0)
        .server(10, 0, 4001, 101, 0);
    let seen = story.connection();
    assert_eq!(
        (seen.client, seen.server),
        (CLIENT.parse().unwrap(), SERVER.parse().unwrap())
    );
    assert_eq!((seen.syns, seen.sent_again()), (1, 0));
    assert_eq!((seen.to_client.bytes, seen.to_server.bytes), (4000, 100));
    assert_eq!(
        (seen.to_client.data_segments, seen.to_client.resets),
        (4, 0)
    );
    assert_eq!(seen.to_client.gap_max.unwrap().length_ns, 710_000);
    assert_eq!(
        seen.to_client.keep_alives + seen.to_client.tail_loss_probes,
        0
    );
}

#[test]
fn what_was_there_before_is_a_retransmission() {
    let mut story = Story::opened();
    story
        .server(100, 0, 0, 0, 1000)
        .server(10, 0, 1000, 0, 1000)
        .server(10, 0, 0, 0, 1000);
    // Half of it is new, and counts as new data.
    story.server(10, 0, 1500, 0, 1000);
    let seen = story.connection();
    assert_eq!((seen.to_client.retransmitted, seen.to_client.late), (2, 0));
    assert_eq!(
        (seen.to_client.bytes, seen.to_server.retransmitted),
        (2500, 0)
    );
}

#[test]
fn what_fills_a_gap_is_late() {
    let mut story = Story::opened();
    story
        .server(100, 0, 1000, 0, 1000)
        .server(10, 0, 0, 0, 1000)
        .server(10, 0, 2000, 0, 10);
    let seen = story.connection();
    assert_eq!((seen.to_client.late, seen.to_client.retransmitted), (1, 0));
    assert_eq!(seen.to_client.bytes, 2010);
}

#[test]
fn a_tail_loss_probe_needs_its_silence() {
    let tail = |after_us| {
        let mut story = Story::opened();
        story
            .client(100, 0, 0, 0, 1000)
            .client(10, 0, 1000, 0, 1000)
            .client(after_us, 0, 1500, 0, 500);
        let seen = story.connection();
        (
            seen.to_server.tail_loss_probes,
            seen.to_server.retransmitted,
        )
    };
    assert_eq!(tail(3_900), (0, 1));
    assert_eq!(tail(4_000), (1, 0));
    assert_eq!(tail(250_000), (0, 1));
    // Not the tail, and the tail for the second time.
    let mut story = Story::opened();
    story
        .client(100, 0, 0, 0, 1000)
        .client(10, 0, 1000, 0, 1000)
        .client(5000, 0, 0, 0, 1000);
    story
        .client(5000, 0, 1500, 0, 500)
        .client(5000, 0, 1500, 0, 500);
    let seen = story.connection();
    assert_eq!(
        (
            seen.to_server.tail_loss_probes,
            seen.to_server.retransmitted
        ),
        (1, 2)
    );
}

#[test]
fn keep_alives_and_window_probes_are_told_apart() {
    let mut story = Story::opened();
    story.server(100, 0, 0, 0, 1000).client(10, 0, 0, 1000, 0);
    // Without data, and with a byte of it.
    story
        .server(2_000_000, 0, 999, 0, 0)
        .server(2_000_000, 0, 999, 0, 1);
    let shut = story.server_isn.wrapping_add(1000);
    story.segment(10, true, 0, 1000, shut, 0, 0);
    story.server(300_000, 0, 999, 0, 0);
    let seen = story.connection();
    assert_eq!(
        (seen.to_client.keep_alives, seen.to_client.window_probes),
        (2, 1)
    );
    assert_eq!(
        (seen.to_client.retransmitted, seen.to_client.bytes),
        (0, 1000)
    );
}

#[test]
fn second_syns_and_resets_are_counted() {
    let mut story = Story::new();
    story
        .client(0, SYN, u32::MAX, 0, 0)
        .client(1_000_000, SYN, u32::MAX, 0, 0);
    story
        .server(100, SYN, u32::MAX, 0, 0)
        .client(10, 0, 0, 0, 0)
        .server(10, RST, 0, 0, 0);
    let seen = story.connection();
    assert_eq!((seen.syns, seen.to_server.retransmitted), (2, 1));
    assert_eq!((seen.to_server.resets, seen.to_client.resets), (0, 1));
}

#[test]
fn the_gap_of_a_moment_is_found() {
    let mut story = Story::opened();
    for (part, after_us) in [100, 100, 900, 100, 5000].into_iter().enumerate() {
        story.server(after_us, 0, part as u32 * 10, 0, 10);
    }
    let seen = story.connection();
    let at = |index: usize| seen.to_client.data_at_ns[index];
    assert_eq!(
        seen.to_client
            .gap_within(at(1) + 1, at(2))
            .unwrap()
            .length_ns,
        900_000
    );
    assert_eq!(
        seen.to_client.gap_within(at(0), at(3)).unwrap().length_ns,
        900_000
    );
    assert_eq!(
        seen.to_client
            .gap_within(at(3) + 5, at(3) + 6)
            .unwrap()
            .length_ns,
        5_000_000
    );
    assert_eq!(seen.to_client.gap_within(at(4) + 1, at(4) + 2), None);
}

#[test]
fn a_clock_that_goes_back_is_seen() {
    let mut story = Story::opened();
    for clock in [u32::MAX - 1, 5, 5, 1000, 999, 2_000_000_000] {
        story.clock = Some(clock);
        story.server(10, 0, 0, 0, 0);
    }
    let seen = story.connection().to_client;
    assert_eq!(
        (seen.clock_back, seen.clock_step_max),
        (1, 2_000_000_000 - 999)
    );
}

#[test]
fn both_families_read_alike() {
    let mut story = Story::new();
    story.family6 = true;
    story
        .client(0, SYN, u32::MAX, 0, 0)
        .server(10, SYN, u32::MAX, 0, 0)
        .server(10, 0, 0, 0, 1400);
    let seen = story.connection();
    assert_eq!(seen.client, "[fd00::2]:5000".parse::<SocketAddr>().unwrap());
    assert_eq!((seen.syns, seen.to_client.bytes), (1, 1400));
}

#[test]
fn a_damaged_file_is_refused() {
    let mut story = Story::opened();
    story.file.truncate(story.file.len() - 5);
    assert!(segments(story.file().path()).is_err());
    story.file = b"not a capture, though long enough for a header".to_vec();
    assert!(segments(story.file().path()).is_err());
    assert!(segments(Path::new("/nonexistent")).is_err());
}

/// Frames with this property, by tshark's judgement.
fn tshark(file: &Path, filter: &str) -> usize {
    let mut command = Command::new("tshark");
    let output = command
        .arg("-n")
        .arg("-r")
        .arg(file)
        .args(["-Y", filter])
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    output.stdout.iter().filter(|byte| **byte == b'\n').count()
}

#[test]
fn tshark_says_the_same() {
    if Command::new("tshark").arg("--version").output().is_err() {
        eprintln!("tshark is not installed: its opinion is not asked");
        return;
    }
    let mut story = Story::opened();
    story.client(100, 0, 0, 0, 200);
    for part in 0..5 {
        story.server(500, 0, part * 1000, 200, 1000);
    }
    // Sent again at once, after a while, and as a tail; then a keep-alive and its answer.
    story
        .server(30_000, 0, 2000, 200, 1000)
        .server(30_000, 0, 3000, 200, 1000);
    story
        .client(10, 0, 200, 4000, 0)
        .server(6_000, 0, 4500, 200, 500);
    story
        .client(10, 0, 200, 5000, 0)
        .server(2_000_000, 0, 4999, 200, 0)
        .client(10, 0, 200, 5000, 0);
    let file = story.file();
    let seen = story.connection().to_client;
    let again = "tcp.analysis.retransmission && tcp.srcport == 80";
    assert_eq!(seen.retransmitted + seen.tail_loss_probes, 3);
    assert_eq!(
        tshark(file.path(), again) as u64,
        seen.retransmitted + seen.tail_loss_probes
    );
    assert_eq!(
        tshark(file.path(), "tcp.analysis.keep_alive") as u64,
        seen.keep_alives
    );
    assert_eq!(seen.keep_alives, 1);
}
