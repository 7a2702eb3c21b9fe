//! A stock client's transfer is handed off around a group, under all conditions for which an intact transfer is
//! promised. Needs root. Each test makes its own lab, and the tests run one after another, since labs would disturb
//! each other's timing.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use holdfast_bench::demo::{DemoDisplay, DemoReport, DemoSpec, RETRANSMISSIONS, run};
use holdfast_lab::ServiceReach;
use holdfast_testbed::cluster::IpFamily;

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Number of runs before a retransmission counts as a fault. TCP retransmits data not acknowledged within 4 ms, with or
/// without handoffs, so a run proves nothing if the machine does not schedule the client or server for this long. A run
/// with retransmissions as its only problem is repeated; a fault of Holdfast would show in every run.
const ATTEMPTS: u32 = 4;

/// Returns a transfer of 64 MiB that takes about 6 s: enough time for 20 handoffs even on a busy machine.
fn demo_spec(name: &str) -> DemoSpec {
    DemoSpec {
        name: format!("t-{name}-{}", std::process::id()),
        bytes: 64 << 20,
        control_bytes: 8 << 20,
        duration: Duration::from_secs(6),
        interval: Duration::from_millis(200),
        ..DemoSpec::default()
    }
}

/// Runs a transfer and asserts that all promises hold. None without root.
fn run_and_check(spec: &DemoSpec) -> Option<DemoReport> {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: a lab needs root");
        return None;
    }
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    for attempt in 1.. {
        let screen = DemoDisplay::new(true);
        let report =
            run(spec, &|event| screen.show(event)).unwrap_or_else(|error| panic!("{error:#}"));
        eprintln!("{}", report.text());
        let only_retransmissions = report
            .problems
            .iter()
            .all(|problem| problem.starts_with(RETRANSMISSIONS));
        if report.passed || attempt == ATTEMPTS || !only_retransmissions {
            assert!(report.passed, "{:#?}\n{:#?}", report.problems, report.wire);
            return Some(report);
        }
        eprintln!(
            "attempt {attempt}: a retransmission timer of some milliseconds expired; trying again"
        );
    }
    None
}

#[test]
fn download_survives_handoffs_over_ipv4() {
    run_and_check(&demo_spec("v4"));
}

#[test]
fn download_survives_handoffs_over_ipv6() {
    run_and_check(&DemoSpec {
        family: IpFamily::V6,
        ..demo_spec("v6")
    });
}

#[test]
fn download_survives_handoffs_with_broadcast() {
    run_and_check(&DemoSpec {
        reach: ServiceReach::Broadcast,
        ..demo_spec("broadcast")
    });
}

#[test]
fn download_survives_handoffs_with_broadcast_over_ipv6() {
    run_and_check(&DemoSpec {
        reach: ServiceReach::Broadcast,
        family: IpFamily::V6,
        ..demo_spec("broadcast6")
    });
}

#[test]
fn download_survives_handoffs_across_segments() {
    run_and_check(&DemoSpec {
        segments: 2,
        ..demo_spec("segments")
    });
}

#[test]
fn download_survives_handoffs_across_segments_over_ipv6() {
    run_and_check(&DemoSpec {
        segments: 2,
        family: IpFamily::V6,
        ..demo_spec("segments6")
    });
}

#[test]
fn upload_survives_handoffs() {
    run_and_check(&DemoSpec {
        upload: true,
        ..demo_spec("upload")
    });
}

#[test]
fn upload_survives_handoffs_across_segments() {
    run_and_check(&DemoSpec {
        upload: true,
        segments: 2,
        ..demo_spec("upload2")
    });
}

#[test]
fn download_survives_handoffs_with_packet_loss() {
    check_with_loss(&DemoSpec {
        loss_pct: 1.0,
        ..demo_spec("loss")
    });
}

#[test]
fn upload_survives_handoffs_with_packet_loss() {
    check_with_loss(&DemoSpec {
        loss_pct: 1.0,
        upload: true,
        ..demo_spec("loss-up")
    });
}

/// Asserts that bytes and handoffs are as promised, and that packets really were lost.
fn check_with_loss(spec: &DemoSpec) {
    let spec = DemoSpec {
        bytes: 16 << 20,
        control_bytes: 2 << 20,
        ..spec.clone()
    };
    if let Some(report) = run_and_check(&spec) {
        let retransmissions = report.wire.sent_again + report.wire.client_probes;
        assert!(
            retransmissions > 0,
            "no packets were lost: {:#?}",
            report.wire
        );
    }
}

#[test]
fn download_survives_tcp_clock_difference() {
    let mut spec = demo_spec("clocks");
    // One hour, and more than three weeks: nearly 2^31 ms, the most that two clocks can differ.
    spec.clock_shift = [
        ("n2".to_owned(), 3_600_000),
        ("n3".to_owned(), 2_000_000_000),
    ]
    .into();
    if let Some(report) = run_and_check(&spec) {
        // Without a clock step at the client, the clocks did not differ.
        let clock_step = report.wire.connection.to_client.clock_step_max;
        assert!(
            clock_step >= 2_000_000_000,
            "the clocks differed by {clock_step} only"
        );
    }
}
