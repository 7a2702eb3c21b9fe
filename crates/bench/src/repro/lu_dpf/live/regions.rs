//! The lab: in each region a registrar, a host of elements and a host of users, with the simulation's delays between
//! them.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_lab::{LabSpec, LinkEntry, Topology};
use holdfast_sim::pools::PoolRunConfig;
use holdfast_sim::zone_network::LinkProperties;

use holdfast_testbed::cluster::find_program;
use holdfast_testbed::cluster::priority::priority_prefix;
use holdfast_testbed::process_lab::{ProcessLab, command_words, find_system_program};

/// Longest wait for any expected event.
const EVENT_TIMEOUT: Duration = Duration::from_secs(60);
/// Hosts per region: a registrar, its elements, its users.
const HOSTS_PER_REGION: usize = 3;

/// Role of a host.
#[derive(Clone, Copy)]
pub(super) enum HostRole {
    Registrar = 1,
    Elements = 2,
    Users = 3,
}

/// Regions with their daemons.
pub(super) struct RegionsLab {
    lab: ProcessLab,
}

/// Returns a host's name.
fn host_name(region: usize, role: HostRole) -> String {
    format!("n{}", region * HOSTS_PER_REGION + role as usize)
}

impl RegionsLab {
    /// Starts the lab with all daemons. The delays and DistanceStep are the simulation's, divided by the time-lapse.
    ///
    /// # Errors
    /// The machine lacks a requirement, or the registrars do not find each other.
    pub(super) fn up(config: &PoolRunConfig, lapse: f64) -> Result<RegionsLab> {
        let count = config.zones.len();
        let topology = topology(&config.links, lapse);
        let spec = LabSpec::new(&format!("regions-{}", std::process::id()))
            .nodes((count * HOSTS_PER_REGION) as u16)
            .clients(0)
            .topology(topology)
            .program(find_program("holdfast")?);
        let mut regions = RegionsLab {
            lab: ProcessLab::from_spec(&spec)?,
        };
        let step = f64::from(config.registrar.distance_step) / lapse;
        ensure!(
            step >= 1.0 && step.fract() == 0.0,
            "DistanceStep divided by --lapse is {step} ms; choose a --lapse that makes it a whole number"
        );
        let step = step as u32;
        for region in 0..count {
            regions.start_registrar(region, step, config.registrar.resolution_items)?;
        }
        regions.wait_for_registrars(count)?;
        for region in 0..count {
            regions.start_pool_daemon(region, HostRole::Elements)?;
            regions.start_pool_daemon(region, HostRole::Users)?;
        }
        for (region, role) in
            (0..count).flat_map(|r| [(r, HostRole::Elements), (r, HostRole::Users)])
        {
            let socket = regions.pool_daemon_socket(region, role)?;
            let socket_exists = || socket.exists().then_some(());
            regions
                .lab
                .wait_for("a pool daemon starts", EVENT_TIMEOUT, socket_exists)?;
        }
        Ok(regions)
    }

    /// Returns the socket at which programs reach the pool daemon of a host.
    ///
    /// # Errors
    /// There is no such host.
    pub(super) fn pool_daemon_socket(&self, region: usize, role: HostRole) -> Result<PathBuf> {
        self.lab.run_path(&host_name(region, role), "pool-app.sock")
    }

    /// Returns the ends of the daemons' logs.
    pub(super) fn log_tails(&self) -> String {
        self.lab.log_tails()
    }

    /// Returns the unrounded distances of a pool's elements as seen by the registrar of each region, in milliseconds:
    /// one list per region.
    ///
    /// # Errors
    /// A registrar does not answer.
    pub(super) fn element_distances(&self, regions: usize, handle: &str) -> Result<Vec<Vec<u32>>> {
        let of = |region| -> Result<Vec<u32>> {
            let client = self
                .lab
                .control_client(&host_name(region, HostRole::Registrar), "registrar")?;
            let pool = client.run(|client| client.pool(handle))?;
            let distances = pool.elements.iter().filter_map(|e| e.policy.distance_ms);
            let mut distances: Vec<u32> = distances.collect();
            distances.sort_unstable();
            Ok(distances)
        };
        (0..regions).map(of).collect()
    }

    fn start_registrar(&mut self, region: usize, step: u32, items: usize) -> Result<()> {
        let name = host_name(region, HostRole::Registrar);
        let own = self.lab.address(&name)?;
        // The daemon's own waits are 0, because the time-lapse would multiply them.
        let text = format!(
            "[registrar]\nlisten = [\"{own}\"]\ndistance_step_ms = {step}\nresolution_items = {items}\n\
             update_delay_ms = 0\nrefresh_delay_ms = 0\n\
             batch_delay_us = 0\n[access]\nregistrar = [\"10.0.0.0/8\"]\n"
        );
        let mut words = command_words(["registrar", "--config"]);
        words.push(self.write_config(&name, &text)?);
        if region > 0 {
            let first = self.lab.address(&host_name(0, HostRole::Registrar))?;
            words.extend(["--peer".to_owned(), first.to_string()]);
        }
        self.run_daemon(&name, "registrar", words)
    }

    fn start_pool_daemon(&mut self, region: usize, role: HostRole) -> Result<()> {
        let name = host_name(region, role);
        let own = self.lab.address(&name)?;
        let registrar = self.lab.address(&host_name(region, HostRole::Registrar))?;
        let text = format!(
            "[pool]\nlisten = [\"{own}\"]\nregistrars = [\"{registrar}\"]\nupdate_interval_ms = 0\n[log]\nfilter = \"warn\"\n"
        );
        let mut words = command_words(["pool", "--config"]);
        words.push(self.write_config(&name, &text)?);
        self.run_daemon(&name, "pool", words)
    }

    fn write_config(&self, host: &str, text: &str) -> Result<String> {
        let path = self.lab.directory().join(format!("{host}.toml"));
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
        Ok(path.display().to_string())
    }

    /// Starts a daemon with priority over the machine's other work.
    fn run_daemon(&mut self, host: &str, name: &str, own: Vec<String>) -> Result<()> {
        let [first, others @ ..] = priority_prefix(true);
        let program = find_system_program(first, "util-linux")?;
        let mut all: Vec<String> = others.map(str::to_owned).into();
        all.push(find_program("rserpoold")?.display().to_string());
        all.extend(own);
        self.lab.run(host, name, &program, &all)
    }

    fn wait_for_registrars(&self, count: usize) -> Result<()> {
        for region in 0..count {
            let name = host_name(region, HostRole::Registrar);
            let has_all_peers = || {
                let client = self.lab.control_client(&name, "registrar").ok()?;
                let peers = client.run(|client| client.peers()).ok()?;
                let active = peers.peers.iter().filter(|peer| peer.active).count();
                (active == count - 1).then_some(())
            };
            self.lab
                .wait_for("registrars find each other", EVENT_TIMEOUT, has_all_peers)?;
        }
        Ok(())
    }
}

/// Returns the links from each host to each other, with the delays between the simulation's zones.
fn topology(links: &[Vec<LinkProperties>], lapse: f64) -> Topology {
    let roles = [HostRole::Registrar, HostRole::Elements, HostRole::Users];
    let hosts =
        || (0..links.len()).flat_map(move |zone| roles.map(|role| (zone, host_name(zone, role))));
    let mut topology = Topology::default();
    for (from, name) in hosts() {
        for (to, other) in hosts().filter(|(_, other)| *other != name) {
            topology = topology.with_entry(LinkEntry {
                toward: Some(other),
                delay_ms: Some(links[from][to].delay.mean_ms() / lapse),
                ..LinkEntry::for_host(&name)
            });
        }
    }
    topology
}
