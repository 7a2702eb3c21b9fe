//! The lab of the demonstration: registrars at n1 and n2, web servers from n3 on, a pool daemon at c1.

use std::fs;

use anyhow::{Context, Result, ensure};
use holdfast_api::control::{BlockingControlClient, PoolDetail};

use super::{EVENT_TIMEOUT, PoolDemoSpec};
use holdfast_testbed::cluster::find_program;
use holdfast_testbed::process_lab::{ProcessLab, command_words, find_system_program};

/// Handle of the pool.
pub const POOL: &str = "web";
const REGISTRARS: [&str; 2] = ["n1", "n2"];

/// The lab and the hosts of its web servers.
pub struct PoolDemoLab {
    lab: ProcessLab,
    elements: Vec<String>,
}

impl PoolDemoLab {
    /// Brings the lab up, and waits until both registrars list all elements.
    ///
    /// # Errors
    /// The machine lacks a requirement, or the pool is not complete within the time limit.
    pub fn up(spec: &PoolDemoSpec) -> Result<PoolDemoLab> {
        ensure!(
            (2..=20).contains(&spec.elements),
            "the number of servers must be 2 to 20, not {}",
            spec.elements
        );
        find_system_program("nginx", "nginx")?;
        let mut lab = ProcessLab::up(&spec.name, spec.elements + 2)?;
        lab.start_registrar("n1", None)?;
        wait_for_registrar(&lab, "n1")?;
        lab.start_registrar("n2", Some("n1"))?;
        wait_for_registrar(&lab, "n2")?;
        let elements: Vec<String> = (3..spec.elements + 3).map(|n| format!("n{n}")).collect();
        for host in &elements {
            start_element(&mut lab, host)?;
        }
        lab.start_pool_daemon("c1", &REGISTRARS)?;
        let scene = PoolDemoLab { lab, elements };
        for registrar in REGISTRARS {
            let lists_all_elements = || {
                (pool_detail(&scene.lab, registrar)?.elements.len() == scene.elements.len())
                    .then_some(())
            };
            scene
                .lab
                .wait_for("all servers in the pool", EVENT_TIMEOUT, lists_all_elements)?;
        }
        let client = scene.daemon()?;
        let answers = || client.run(|client| client.pool_daemon()).ok().map(drop);
        scene
            .lab
            .wait_for("the client's pool daemon", EVENT_TIMEOUT, answers)?;
        Ok(scene)
    }

    /// Returns the hosts of the web servers.
    pub fn elements(&self) -> &[String] {
        &self.elements
    }

    /// Returns the lab of registrars, web servers and client.
    pub fn lab(&self) -> &ProcessLab {
        &self.lab
    }

    /// Returns a client of the pool daemon at c1.
    ///
    /// # Errors
    /// The system gives no descriptors.
    pub fn daemon(&self) -> Result<BlockingControlClient> {
        self.lab.control_client("c1", "pool")
    }

    /// Kills all processes of a host.
    ///
    /// # Errors
    /// The host has no process.
    pub fn kill(&self, host: &str) -> Result<()> {
        self.lab.kill_all(host).map(drop)
    }

    /// Waits until no registrar lists the killed element of `host`.
    ///
    /// # Errors
    /// The wait takes too long.
    pub fn wait_until_delisted(&self, host: &str) -> Result<()> {
        let address = self.lab.address(host)?;
        let is_delisted = || {
            let has_no_address = |pool: PoolDetail| {
                let mut addresses = pool.elements.iter().flat_map(|element| &element.addresses);
                addresses.any(|at| at.ip() == address)
            };
            let listed = REGISTRARS
                .map(|registrar| pool_detail(&self.lab, registrar).is_none_or(has_no_address));
            (listed == [false, false]).then_some(())
        };
        self.lab.wait_for(
            "the end of the killed server's registration",
            EVENT_TIMEOUT,
            is_delisted,
        )
    }

    /// Returns the registrar that is home of most elements, and the other one.
    ///
    /// # Errors
    /// A registrar does not answer.
    pub fn busiest_registrar(&self) -> Result<(String, String)> {
        let owned_elements = |host: &str| -> Result<u64> {
            let client = self.lab.control_client(host, "registrar")?;
            Ok(client.run(|client| client.registrar())?.own_elements)
        };
        let [one, two] = REGISTRARS.map(str::to_owned);
        Ok(match owned_elements(&one)? >= owned_elements(&two)? {
            true => (one, two),
            false => (two, one),
        })
    }

    /// Waits until a registrar is the home of `living` elements; returns the fewest that the registrar listed
    /// meanwhile.
    ///
    /// # Errors
    /// The wait takes too long.
    pub fn wait_for_takeover(&self, host: &str, living: usize) -> Result<usize> {
        let client = self.lab.control_client(host, "registrar")?;
        let id = client.run(|client| client.registrar())?.id;
        let mut fewest = living;
        let has_taken_over = || {
            let pool = pool_detail(&self.lab, host)?;
            fewest = fewest.min(pool.elements.len());
            let own = pool.elements.iter().filter(|element| element.home == id);
            (own.count() >= living).then_some(())
        };
        self.lab.wait_for(
            "the takeover of the killed registrar's elements",
            EVENT_TIMEOUT,
            has_taken_over,
        )?;
        Ok(fewest)
    }
}

fn wait_for_registrar(lab: &ProcessLab, host: &str) -> Result<()> {
    let client = lab.control_client(host, "registrar")?;
    let is_ready = || {
        client
            .run(|client| client.registrar())
            .ok()?
            .ready
            .then_some(())
    };
    lab.wait_for("a registrar that serves", EVENT_TIMEOUT, is_ready)
}

fn pool_detail(lab: &ProcessLab, registrar: &str) -> Option<PoolDetail> {
    let client = lab.control_client(registrar, "registrar").ok()?;
    client.run(|client| client.pool(POOL)).ok()
}

/// Starts `holdfast pool register --handle web ... -- nginx ...`: a stock server that returns its host's name.
fn start_element(lab: &mut ProcessLab, host: &str) -> Result<()> {
    let directory = lab.directory().join(host);
    fs::create_dir_all(&directory).context("create a directory for nginx")?;
    let own = directory.display();
    let config = format!(
        r#"worker_processes 1;
pid {own}/nginx.pid;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {own}/body;
    proxy_temp_path {own}/proxy;
    fastcgi_temp_path {own}/fastcgi;
    uwsgi_temp_path {own}/uwsgi;
    scgi_temp_path {own}/scgi;
    server {{
        listen 80;
        location / {{ return 200 "{host}\n"; }}
    }}
}}
"#
    );
    let path = directory.join("nginx.conf");
    fs::write(&path, config)?;
    let mut arguments = command_words(["pool", "register", "--handle", POOL, "--policy", "RR"]);
    arguments.extend(lab.registrar_arguments(&REGISTRARS)?);
    arguments.push("--".to_owned());
    arguments.push(find_system_program("nginx", "nginx")?.display().to_string());
    arguments.extend(["-e".to_owned(), "stderr".to_owned(), "-c".to_owned()]);
    arguments.push(path.display().to_string());
    arguments.extend(command_words(["-g", "daemon off;"]));
    lab.run(host, "register", &find_program("holdfast")?, &arguments)
}
