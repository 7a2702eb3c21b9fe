//! The conditions of a start, for `holdfastd --check` and for the start itself, which examines them before it changes
//! anything.

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::path::Path;

use holdfast_api::ca::NodeRole;
use holdfast_api::enrolment::certified_role;
use holdfast_bpf::{Dataplane as Programs, MapChange};
use holdfast_daemon::exit_code::DaemonExitCode;
use holdfast_daemon::socket_path::is_in_use;
use holdfast_daemon::start_check::{AddressUse, StartCheck, StartProblems};
use holdfast_daemon::tls::read_certificates;
use holdfast_sys::net::Interface;
use holdfast_wire::membership_frames::JoinRole;

use super::host_changes::read_record;
use super::setup::{SetupError, check_capabilities, system_error};
use crate::app_server::group_id;
use crate::config::Config;
use crate::dataplane::HoldDevice;
use crate::membership::check_endpoints;

/// `BPF_FS_MAGIC` and `CGROUP2_SUPER_MAGIC` of `linux/magic.h`.
const BPF_FILE_SYSTEM: i64 = 0xcafe_4a11;
const CGROUP2_FILE_SYSTEM: i64 = 0x6367_7270;

/// Examines all conditions of a start, while the daemon runs or not. Returns the pinned maps whose entries the start
/// would carry over.
///
/// # Errors
/// All problems, also those with which a daemon starts.
pub fn check_start(config: &Config) -> Result<Vec<MapChange>, StartProblems> {
    let address_use = match is_in_use(&config.control_socket()) {
        true => AddressUse::RunningDaemon,
        false => AddressUse::Free,
    };
    let mut check = StartCheck::default();
    check.log(&config.log);
    if let Err(error) = check_capabilities(config) {
        let code = error.exit_code();
        check.add_error_with_code(error, code);
    }
    let changes = examine(config, address_use, &mut check);
    examine_view_store(config, &mut check);
    check.finish().map(|()| changes)
}

/// Examines the conditions that a start has not met yet when the log is set up.
///
/// # Errors
/// The problems with which the daemon cannot start. The others are logged.
pub(super) fn check_before_start(config: &Config) -> Result<(), SetupError> {
    let mut check = StartCheck::default();
    for change in examine(config, AddressUse::Free, &mut check) {
        tracing::info!(%change, "the entries of a pinned map are carried over");
    }
    Ok(check.finish_for_start()?)
}

/// Returns the interface of the configuration.
pub(super) fn find_interface(config: &Config) -> Result<Interface, SetupError> {
    let name = &config.node.interface;
    Interface::find(name).map_err(system_error(format!("interface {name} (node.interface)")))
}

fn examine(config: &Config, address_use: AddressUse, check: &mut StartCheck) -> Vec<MapChange> {
    let node = &config.node;
    check.certificates(&config.tls, Some(&node.name));
    examine_role(config, check);
    if let Err(error) = find_interface(config) {
        let code = error.exit_code();
        check.add_error_with_code(error, code);
    }
    check.directory("node.run_dir", &node.run_dir);
    check.directory("node.state_dir", &node.state_dir);
    if let Err(error) = read_record(&node.state_dir) {
        check.add_warning(format!(
            "{error}; remove the file, and the service addresses that no daemon needs any more"
        ));
    }
    check.socket(&config.control_socket(), address_use);
    check.socket(&config.app_socket(), address_use);
    if let Some(name) = &config.app.group {
        check.value_of(group_id(name));
    }
    let channel = SocketAddr::new(node.address, node.port);
    check.tcp_address("node.address and node.port", channel, address_use);
    if let Some(address) = config.metrics_listen {
        check.tcp_address("metrics.listen", address, address_use);
    }
    for address in config.dns.iter().flat_map(|dns| &dns.listen) {
        check.tcp_address("dns.listen", *address, address_use);
        check.udp_address("dns.listen", *address, address_use);
    }
    check.value_of(HoldDevice::check_support());
    examine_cgroup(config, check);
    examine_pins(config, check)
}

/// Compares the role that this node wants in its group with the one in its certificate.
fn examine_role(config: &Config, check: &mut StartCheck) {
    let wants_backup =
        (config.group.self_running.as_ref()).is_some_and(|group| group.role == JoinRole::Backup);
    let certificates = read_certificates(&config.tls.cert).unwrap_or_default();
    let certified = certificates.first().and_then(|first| certified_role(first));
    if wants_backup && certified == Some(NodeRole::Server) {
        let problem = format!(
            "{}: the certificate admits this node as a server node only; write role = \"server\" into section [group], or \
             issue a certificate with `--role backup`",
            config.tls.cert.display()
        );
        check.add_error(&io::Error::new(io::ErrorKind::InvalidInput, problem));
    }
}

/// Reads the group's view at each endpoint of etcd. A daemon starts without etcd nevertheless, and waits.
fn examine_view_store(config: &Config, check: &mut StartCheck) {
    let self_running = config.group.self_running.as_ref();
    let Some(store) = self_running.and_then(|self_running| self_running.store.as_ref()) else {
        return;
    };
    let Some(name) = check.value_of(config.node.name.parse()) else {
        return;
    };
    let failures = check_endpoints(store, &config.group.name, &name);
    let is_silent = failures.len() == store.endpoints.len();
    for (endpoint, error) in failures {
        let problem = format!("etcd endpoint {endpoint} (etcd.endpoints): {error}");
        match is_silent {
            true => check.add_error_with_code(problem, DaemonExitCode::Configuration),
            false => check.add_warning(problem),
        }
    }
}

fn examine_cgroup(config: &Config, check: &mut StartCheck) {
    let Some(cgroup) = check.value_of(config.node.cgroup()) else {
        return;
    };
    let problem = match File::open(&cgroup).and_then(|_| file_system(&cgroup)) {
        Ok(CGROUP2_FILE_SYSTEM) => return,
        Ok(_) => "not a directory of a cgroup2 file system".to_owned(),
        Err(error) => error.to_string(),
    };
    let error = io::Error::new(
        io::ErrorKind::NotFound,
        format!("{}: {problem}; correct node.cgroup", cgroup.display()),
    );
    check.add_error(&error);
}

fn examine_pins(config: &Config, check: &mut StartCheck) -> Vec<MapChange> {
    let pins = &config.node.bpffs;
    let existing = pins.ancestors().find(|ancestor| ancestor.is_dir());
    let is_bpffs = file_system(existing.unwrap_or(Path::new(".")));
    let problem = match is_bpffs {
        Ok(BPF_FILE_SYSTEM) => None,
        Ok(_) => Some(io::Error::other("not a directory of a BPF file system")),
        Err(error) => Some(error),
    };
    if let Some(source) = problem {
        let path = pins.clone();
        check.add_error(&holdfast_bpf::Error::Pin { path, source });
        return Vec::new();
    }
    let surveyed = check.value_of(Programs::survey_pins(pins, config.node.capacity));
    let (changes, errors) = surveyed.unwrap_or_default();
    for error in errors {
        check.add_error_with_code(error, DaemonExitCode::Configuration);
    }
    changes
}

/// Returns the type of a path's file system, as in `linux/magic.h`.
fn file_system(path: &Path) -> io::Result<i64> {
    Ok(rustix::fs::statfs(path)?.f_type)
}
