//! Tests of the analysis with generated captures.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use super::capture_builder::{CaptureBuilder, FIN, RST, SYN};
use super::*;

const CLIENT: &str = "10.0.0.2:5000";
const SERVER: &str = "10.0.0.1:80";

#[test]
fn undisturbed_connection_has_zero_counters() {
    let mut story = CaptureBuilder::established();
    story.client_segment(50, 0, 0, 0, 100);
    for part in 0..4 {
        story
            .server_segment(700, 0, part * 1000, 100, 1000)
            .client_segment(10, 0, 100, part * 1000 + 1000, 0);
    }
    story
        .server_segment(10, FIN, 4000, 100, 0)
        .client_segment(10, FIN, 100, 4001, 0)
        .server_segment(10, 0, 4001, 101, 0);
    let seen = story.connection();
    assert_eq!(
        (seen.client, seen.server),
        (CLIENT.parse().unwrap(), SERVER.parse().unwrap())
    );
    assert_eq!((seen.syns, seen.retransmissions()), (1, 0));
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
fn repeated_data_counts_as_retransmission() {
    let mut story = CaptureBuilder::established();
    story
        .server_segment(100, 0, 0, 0, 1000)
        .server_segment(10, 0, 1000, 0, 1000)
        .server_segment(10, 0, 0, 0, 1000);
    // Half of the segment is new, and counts as new data.
    story.server_segment(10, 0, 1500, 0, 1000);
    let seen = story.connection();
    assert_eq!((seen.to_client.retransmitted, seen.to_client.late), (2, 0));
    assert_eq!(
        (seen.to_client.bytes, seen.to_server.retransmitted),
        (2500, 0)
    );
}

#[test]
fn data_filling_a_gap_counts_as_late() {
    let mut story = CaptureBuilder::established();
    story
        .server_segment(100, 0, 1000, 0, 1000)
        .server_segment(10, 0, 0, 0, 1000)
        .server_segment(10, 0, 2000, 0, 10);
    let seen = story.connection();
    assert_eq!((seen.to_client.late, seen.to_client.retransmitted), (1, 0));
    assert_eq!(seen.to_client.bytes, 2010);
}

#[test]
fn tail_loss_probe_requires_preceding_silence() {
    let tail = |after_us| {
        let mut story = CaptureBuilder::established();
        story
            .client_segment(100, 0, 0, 0, 1000)
            .client_segment(10, 0, 1000, 0, 1000)
            .client_segment(after_us, 0, 1500, 0, 500);
        let seen = story.connection();
        (
            seen.to_server.tail_loss_probes,
            seen.to_server.retransmitted,
        )
    };
    assert_eq!(tail(3_900), (0, 1));
    assert_eq!(tail(4_000), (1, 0));
    assert_eq!(tail(250_000), (0, 1));
    // First a segment before the tail, then the tail twice.
    let mut story = CaptureBuilder::established();
    story
        .client_segment(100, 0, 0, 0, 1000)
        .client_segment(10, 0, 1000, 0, 1000)
        .client_segment(5000, 0, 0, 0, 1000);
    story
        .client_segment(5000, 0, 1500, 0, 500)
        .client_segment(5000, 0, 1500, 0, 500);
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
fn probe_for_acknowledged_data_is_counted_separately() {
    let probed = |acknowledges| {
        let mut story = CaptureBuilder::established();
        story
            .server_segment(100, 0, 0, 0, 1000)
            .client_segment(10, 0, 0, acknowledges, 0);
        story.server_segment(5000, 0, 500, 0, 500);
        let seen = story.connection().to_client;
        (seen.tail_loss_probes, seen.probes_before_answer)
    };
    assert_eq!((probed(1000), probed(999)), ((1, 0), (1, 1)));
}

#[test]
fn keep_alives_and_window_probes_are_distinguished() {
    let mut story = CaptureBuilder::established();
    story
        .server_segment(100, 0, 0, 0, 1000)
        .client_segment(10, 0, 0, 1000, 0);
    // Once without data, and once with a byte of it.
    story
        .server_segment(2_000_000, 0, 999, 0, 0)
        .server_segment(2_000_000, 0, 999, 0, 1);
    let shut = story.server_isn.wrapping_add(1000);
    story.segment(10, true, 0, 1000, shut, 0, 0);
    story.server_segment(300_000, 0, 999, 0, 0);
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
    let mut story = CaptureBuilder::new();
    story
        .client_segment(0, SYN, u32::MAX, 0, 0)
        .client_segment(1_000_000, SYN, u32::MAX, 0, 0);
    story
        .server_segment(100, SYN, u32::MAX, 0, 0)
        .client_segment(10, 0, 0, 0, 0)
        .server_segment(10, RST, 0, 0, 0);
    let seen = story.connection();
    assert_eq!((seen.syns, seen.to_server.retransmitted), (2, 1));
    assert_eq!((seen.to_server.resets, seen.to_client.resets), (0, 1));
}

#[test]
fn gap_around_a_moment_is_found() {
    let mut story = CaptureBuilder::established();
    for (part, after_us) in [100, 100, 900, 100, 5000].into_iter().enumerate() {
        story.server_segment(after_us, 0, part as u32 * 10, 0, 10);
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
fn backward_timestamp_is_counted() {
    let mut story = CaptureBuilder::established();
    for clock in [u32::MAX - 1, 5, 5, 1000, 999, 2_000_000_000] {
        story.clock = Some(clock);
        story.server_segment(10, 0, 0, 0, 0);
    }
    let seen = story.connection().to_client;
    assert_eq!(
        (seen.clock_back, seen.clock_step_max),
        (1, 2_000_000_000 - 999)
    );
}

#[test]
fn late_syn_does_not_count_as_backward_timestamp() {
    let mut story = CaptureBuilder::new();
    for (clock, flags, sequence) in [(1025, SYN, u32::MAX), (0, SYN, u32::MAX), (1026, 0, 0)] {
        story.clock = Some(clock);
        story.server_segment(10, flags, sequence, 0, 0);
    }
    let seen = story.connection().to_client;
    assert_eq!((seen.clock_back, seen.clock_step_max), (0, 1));
}

#[test]
fn ipv4_and_ipv6_captures_parse_equally() {
    let mut story = CaptureBuilder::new();
    story.is_ipv6 = true;
    story
        .client_segment(0, SYN, u32::MAX, 0, 0)
        .server_segment(10, SYN, u32::MAX, 0, 0)
        .server_segment(10, 0, 0, 0, 1400);
    let seen = story.connection();
    assert_eq!(seen.client, "[fd00::2]:5000".parse::<SocketAddr>().unwrap());
    assert_eq!((seen.syns, seen.to_client.bytes), (1, 1400));
}

#[test]
fn damaged_file_is_refused() {
    let mut story = CaptureBuilder::established();
    story.bytes.truncate(story.bytes.len() - 5);
    assert!(read_capture_file(story.write_file().path()).is_err());
    story.bytes = b"not a capture, though long enough for a header".to_vec();
    assert!(read_capture_file(story.write_file().path()).is_err());
    assert!(read_capture_file(Path::new("/nonexistent")).is_err());
}

/// Returns the number of frames that match a tshark filter.
fn count_with_tshark(file: &Path, filter: &str) -> usize {
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
fn tshark_agrees_with_analysis() {
    if Command::new("tshark").arg("--version").output().is_err() {
        eprintln!("skipped the comparison with tshark: not installed");
        return;
    }
    let mut story = CaptureBuilder::established();
    story.client_segment(100, 0, 0, 0, 200);
    for part in 0..5 {
        story.server_segment(500, 0, part * 1000, 200, 1000);
    }
    // Sent again at once, after some time, and as a tail; then a keep-alive and its answer.
    story
        .server_segment(30_000, 0, 2000, 200, 1000)
        .server_segment(30_000, 0, 3000, 200, 1000);
    story
        .client_segment(10, 0, 200, 4000, 0)
        .server_segment(6_000, 0, 4500, 200, 500);
    story
        .client_segment(10, 0, 200, 5000, 0)
        .server_segment(2_000_000, 0, 4999, 200, 0)
        .client_segment(10, 0, 200, 5000, 0);
    let file = story.write_file();
    let seen = story.connection().to_client;
    let again = "tcp.analysis.retransmission && tcp.srcport == 80";
    assert_eq!(seen.retransmitted + seen.tail_loss_probes, 3);
    assert_eq!(
        count_with_tshark(file.path(), again) as u64,
        seen.retransmitted + seen.tail_loss_probes
    );
    assert_eq!(
        count_with_tshark(file.path(), "tcp.analysis.keep_alive") as u64,
        seen.keep_alives
    );
    assert_eq!(seen.keep_alives, 1);
}
