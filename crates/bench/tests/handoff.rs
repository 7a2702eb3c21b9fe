//! A stock client's transfer is handed off around a group, under all conditions for which an intact transfer is
//! promised. Needs root. Each test makes its own lab, and the tests run one after another, since labs would disturb
//! each other's timing.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use holdfast_bench::cluster::Family;
use holdfast_bench::demo::{DemoSpec, Report, Screen, run};
use holdfast_lab::Reach;

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Number of runs before a retransmission counts as a fault. TCP retransmits data not acknowledged within 4 ms, with or
/// without handoffs, so a run proves nothing if the machine does not schedule the client or server for this long. A run
/// with retransmissions as its only problem is repeated; a fault of Holdfast would show in every run.
const ATTEMPTS: u32 = 4;

/// Text of a problem report that names retransmissions.
const SENT_AGAIN: &str = "segments sent again";

/// Returns a transfer of 64 MiB that takes about 6 s: enough time for 20 handoffs even on a busy machine.
fn spec(name: &str) -> DemoSpec {
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
fn keeps_its_promise(spec: &DemoSpec) -> Option<Report> {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: a lab needs root");
        return None;
    }
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    for attempt in 1.. {
        let screen = Screen::new(true);
        let report =
            run(spec, &|event| screen.show(event)).unwrap_or_else(|error| panic!("{error:#}"));
        eprintln!("{}", report.text());
        let only_timers = report
            .problems
            .iter()
            .all(|problem| problem.starts_with(SENT_AGAIN));
        if report.passed || attempt == ATTEMPTS || !only_timers {
            assert!(report.passed, "{:#?}\n{:#?}", report.problems, report.wire);
            return Some(report);
        }
        eprintln!("attempt {attempt}: a timer of some milliseconds ran out; trying again");
    }
    None
}

#[test]
fn a_download_over_ipv4() {
    keeps_its_promise(&spec("v4"));
}

#[test]
fn a_download_over_ipv6() {
    keeps_its_promise(&DemoSpec {
        family: Family::V6,
        ..spec("v6")
    });
}

#[test]
fn a_download_with_broadcast() {
    keeps_its_promise(&DemoSpec {
        reach: Reach::Broadcast,
        ..spec("broadcast")
    });
}

#[test]
fn a_download_with_broadcast_over_ipv6() {
    keeps_its_promise(&DemoSpec {
        reach: Reach::Broadcast,
        family: Family::V6,
        ..spec("broadcast6")
    });
}

#[test]
fn a_download_across_two_segments() {
    keeps_its_promise(&DemoSpec {
        segments: 2,
        ..spec("segments")
    });
}

#[test]
fn a_download_across_two_segments_over_ipv6() {
    keeps_its_promise(&DemoSpec {
        segments: 2,
        family: Family::V6,
        ..spec("segments6")
    });
}

#[test]
fn an_upload() {
    keeps_its_promise(&DemoSpec {
        upload: true,
        ..spec("upload")
    });
}

#[test]
fn an_upload_across_two_segments() {
    keeps_its_promise(&DemoSpec {
        upload: true,
        segments: 2,
        ..spec("upload2")
    });
}

#[test]
fn a_download_with_loss() {
    lossy(&DemoSpec {
        loss_pct: 1.0,
        ..spec("loss")
    });
}

#[test]
fn an_upload_with_loss() {
    lossy(&DemoSpec {
        loss_pct: 1.0,
        upload: true,
        ..spec("loss-up")
    });
}

/// Asserts that bytes and handoffs are as promised, and that packets really were lost.
fn lossy(spec: &DemoSpec) {
    let spec = DemoSpec {
        bytes: 16 << 20,
        control_bytes: 2 << 20,
        ..spec.clone()
    };
    if let Some(report) = keeps_its_promise(&spec) {
        let again = report.wire.sent_again + report.wire.client_probes;
        assert!(again > 0, "nothing was lost: {:#?}", report.wire);
    }
}

#[test]
fn a_download_between_nodes_whose_tcp_clocks_differ() {
    let mut spec = spec("clocks");
    // One hour, and more than three weeks: nearly 2^31 ms, the most that two clocks can differ.
    spec.clock_shift = [
        ("n2".to_owned(), 3_600_000),
        ("n3".to_owned(), 2_000_000_000),
    ]
    .into();
    if let Some(report) = keeps_its_promise(&spec) {
        // Without a clock step at the client, the clocks did not differ.
        let step = report.wire.connection.to_client.clock_step_max;
        assert!(step >= 2_000_000_000, "the clocks differed by {step} only");
    }
}
