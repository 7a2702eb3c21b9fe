//! Distances of pool elements, as real registrars measure them over links with delays. Runs in a lab; needs root.

use std::time::Duration;

use holdfast_api::control::{BlockingControlClient, PolicyDetail, ResolveQuery};
use holdfast_api::pool::{Element, ElementService, RegistrationRequest};
use holdfast_lab::{LabSpec, LinkEntry, Topology};
use holdfast_testbed::cluster::find_program;
use holdfast_testbed::process_lab::{ProcessLab, command_words};

/// Longest wait for any condition, with a margin for a heavily loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);
const LINK_DELAY_MS: f64 = 60.0;
const ROUNDING_STEP_MS: u32 = 150;

/// Returns the distance of the pool's only element, as a registrar reports it to pool users.
fn reported_distance(daemon: &BlockingControlClient) -> Option<u32> {
    let query = ResolveQuery::default();
    let found = daemon.run(|daemon| daemon.resolve("far", &query)).ok()?;
    found.elements.first()?.policy.distance_ms
}

fn start_registrar(lab: &mut ProcessLab, host: &str, peer: Option<&str>) {
    let own_address = lab.address(host).expect("a host");
    let text = format!(
        "[registrar]\nlisten = [\"{own_address}\"]\ndistance_step_ms = {ROUNDING_STEP_MS}\n[access]\nregistrar = [\"10.0.0.0/8\"]\n"
    );
    let file = lab.directory().join(format!("{host}.toml"));
    std::fs::write(&file, text).expect("a file");
    let mut arguments = command_words(["registrar", "--config"]);
    arguments.push(file.display().to_string());
    if let Some(peer) = peer {
        let peer = lab.address(peer).expect("a host");
        arguments.extend(["--peer".to_owned(), peer.to_string()]);
    }
    let holdfast = find_program("holdfast").expect("holdfast");
    lab.run(host, "registrar", &holdfast, &arguments)
        .expect("a registrar");
    // A pool daemon on the same host leaves the port of encapsulated SCTP to the registrar only when the registrar has
    // opened that port.
    let client = lab.control_client(host, "registrar").expect("a client");
    let status = || client.run(|daemon| daemon.registrar()).ok();
    lab.wait_for("the registrar", PATIENCE, status)
        .expect("a registrar");
}

/// The element is 60 ms from its registrar, and this registrar is 60 ms from the other. With steps of 150 ms each delay
/// alone rounds to 0, and the sum rounds to one step. A distance that a registrar reported before it had measured the
/// delay changes with the next registration.
#[test]
fn delays_are_summed_before_rounding() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: a lab needs root");
        return;
    }
    let link = |from: &str, to: &str| LinkEntry {
        toward: Some(to.into()),
        delay_ms: Some(LINK_DELAY_MS),
        ..LinkEntry::for_host(from)
    };
    let links = [("n1", "n2"), ("n2", "n1"), ("n2", "n3"), ("n3", "n2")];
    let topology = links.into_iter().fold(Topology::default(), |all, (a, b)| {
        all.with_entry(link(a, b))
    });
    let spec = LabSpec::new(&format!("distances-{}", std::process::id()))
        .nodes(3)
        .clients(0)
        .topology(topology)
        .program(find_program("holdfast").expect("holdfast"));
    let mut lab = ProcessLab::from_spec(&spec).expect("a lab");
    start_registrar(&mut lab, "n2", None);
    start_registrar(&mut lab, "n3", Some("n2"));
    lab.start_pool_daemon("n1", &["n2"]).expect("a pool daemon");
    lab.start_pool_daemon("n3", &["n3"]).expect("a pool daemon");

    let socket = lab.run_path("n1", "pool-app.sock").expect("a host");
    let own_address = lab.address("n1").expect("a host");
    let policy = |load: f64| PolicyDetail {
        name: "LU-DPF".to_owned(),
        load: Some(load),
        delay_penalty: Some(1e-5),
        ..PolicyDetail::default()
    };
    let mut registration =
        RegistrationRequest::new("far", ElementService::Tcp((own_address, 80).into()));
    registration.policy = policy(0.0);
    let element = || Element::register(&socket, registration.clone()).ok();
    let element = lab.wait_for("the pool daemon", PATIENCE, element);
    let element = element.expect("a pool daemon");
    let [home, other] =
        ["n1", "n3"].map(|host| lab.control_client(host, "pool").expect("a client"));
    let mut load = 0.0;
    let expected_distances = || {
        // Each registration carries the delay that is known at that time.
        load = if load > 0.0 { 0.0 } else { 0.1 };
        element.set_policy(policy(load)).expect("told");
        let distances = (reported_distance(&home)?, reported_distance(&other)?);
        (distances == (0, ROUNDING_STEP_MS)).then_some(())
    };
    lab.wait_for("distances of 0 and a step", PATIENCE, expected_distances)
        .expect("the sum is rounded, not its parts");
}
