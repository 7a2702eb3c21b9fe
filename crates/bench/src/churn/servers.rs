//! The servers: stock programs, each run as its documentation says.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::protocols::{ProtocolConnection, ServerProtocol};
use super::{BACKEND_HOST, BACKEND_PORT, CLIENT_HOST, SERVER_PORT};
use holdfast_testbed::cluster::IpFamily;
use holdfast_testbed::process_lab::find_system_program;
use holdfast_testbed::process_moves::NodeGroup;

/// A server and its protocol.
#[derive(Debug)]
pub struct ServerProgram {
    /// Name of the program.
    pub name: &'static str,
    protocol: ServerProtocol,
    /// Creates the server's files and returns the words of its command.
    prepare: fn(&ServerSetup<'_>) -> Result<Vec<String>>,
}

/// All servers that `holdfast bench churn` can measure.
pub const PROGRAMS: &[ServerProgram] = &[
    ServerProgram {
        name: "nginx",
        protocol: ServerProtocol::Http,
        prepare: |site| nginx_command(site, 1, "return 200 $request_uri;"),
    },
    ServerProgram {
        name: "nginx-4",
        protocol: ServerProtocol::Http,
        prepare: |site| nginx_command(site, 4, "return 200 $request_uri;"),
    },
    ServerProgram {
        name: "haproxy",
        protocol: ServerProtocol::Http,
        prepare: haproxy_command,
    },
    ServerProgram {
        name: "postgresql",
        protocol: ServerProtocol::Postgresql,
        prepare: postgresql_command,
    },
    ServerProgram {
        name: "php-fpm",
        protocol: ServerProtocol::Http,
        prepare: php_fpm_command,
    },
    ServerProgram {
        name: "jvm",
        protocol: ServerProtocol::Echo,
        prepare: jvm_command,
    },
    ServerProgram {
        name: "go",
        protocol: ServerProtocol::Http,
        prepare: go_command,
    },
];

/// Returns the program with this name.
///
/// # Errors
/// There is no such program.
pub fn find_server_program(name: &str) -> Result<&'static ServerProgram> {
    let found = PROGRAMS.iter().find(|program| program.name == name);
    found.with_context(|| {
        let names: Vec<_> = PROGRAMS.iter().map(|program| program.name).collect();
        format!("unknown program {name}; possible are {}", names.join(", "))
    })
}

/// Folder and addresses of a server.
struct ServerSetup<'a> {
    folder: &'a Path,
    address: SocketAddr,
    /// Address of the backend that the server connects to.
    backend: SocketAddr,
}

/// A running server of the benchmark.
#[derive(Debug)]
pub struct RunningServer {
    address: SocketAddr,
    protocol: ServerProtocol,
    /// First process of the server.
    pub pid: i32,
}

impl RunningServer {
    /// Starts a server at the first of [`SERVER_NODES`](holdfast_testbed::process_moves::SERVER_NODES), and waits until the server answers.
    ///
    /// # Errors
    /// The server is not installed, or does not start.
    pub fn start(
        program: &'static ServerProgram,
        group: &NodeGroup,
        folder: &Path,
    ) -> Result<Self> {
        // Some servers change to another user, which must be able to read the folder.
        fs::set_permissions(folder, Permissions::from_mode(0o755))?;
        let lab = group.cluster().lab();
        let (backend, _) = lab.address(BACKEND_HOST)?;
        let site = ServerSetup {
            folder,
            address: SocketAddr::new(group.cluster().service_address(IpFamily::V4), SERVER_PORT),
            backend: SocketAddr::new(backend.into(), BACKEND_PORT),
        };
        let listener =
            lab.run_in_net_namespace(BACKEND_HOST, || TcpListener::bind(site.backend))??;
        std::thread::spawn(move || serve_backend(&listener));
        let words = (program.prepare)(&site)?;
        let pid = group.add_program_output(group.start_program(folder, &words), folder)?;
        let server = Self {
            address: site.address,
            protocol: program.protocol,
            pid,
        };
        let is_answering = || {
            let open = || {
                ProtocolConnection::open(server.address, server.protocol, Duration::from_secs(5))
            };
            let mut open = lab.run_in_net_namespace(CLIENT_HOST, open).ok()?.ok()?;
            let wrong = open.exchange(0, 0).ok()?;
            open.close().ok()?;
            (wrong.0 == 0).then_some(())
        };
        group.add_program_output(group.wait_for("the server answers", is_answering), folder)?;
        Ok(server)
    }

    /// Returns the server's address and protocol.
    pub fn address_and_protocol(&self) -> (SocketAddr, ServerProtocol) {
        (self.address, self.protocol)
    }
}

/// Serves as the backend of a proxy: answers each request with the requested path. Ends with the benchmark.
fn serve_backend(listener: &TcpListener) {
    for stream in listener.incoming().flatten() {
        std::thread::spawn(move || answer_connection(&stream));
    }
}

fn answer_connection(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut lines = BufReader::new(stream).lines();
    loop {
        let Some(first) = lines.next().transpose()? else {
            return Ok(());
        };
        while lines
            .next()
            .transpose()?
            .is_some_and(|line| !line.is_empty())
        {}
        let path = first.split(' ').nth(1).unwrap_or_default();
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", path.len());
        let mut to: &TcpStream = stream;
        to.write_all([head.as_bytes(), path.as_bytes()].concat().as_slice())?;
    }
}

fn nginx_command(site: &ServerSetup<'_>, workers: usize, location: &str) -> Result<Vec<String>> {
    let program = find_system_program("nginx", "nginx")?.display().to_string();
    let folder = site.folder.display();
    let names = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let paths: String = names
        .iter()
        .map(|name| format!("{name}_temp_path {folder}/{name};\n"))
        .collect();
    let text = format!(
        "daemon off;\nuser root;\nworker_processes {workers};\npid {folder}/nginx.pid;\n\
         error_log {folder}/nginx.log;\nevents {{ worker_connections 1024; }}\nhttp {{\n{paths}access_log off;\n\
         keepalive_requests 1000000000;\nkeepalive_timeout 1h;\nkeepalive_time 24h;\n\
         server {{ listen {}; location / {{ {location} }} }}\n}}\n",
        site.address
    );
    let file = site.write("nginx.conf", &text)?;
    Ok([&program, "-e", "stderr", "-c", &file]
        .map(str::to_owned)
        .into())
}

fn haproxy_command(site: &ServerSetup<'_>) -> Result<Vec<String>> {
    let program = find_system_program("haproxy", "haproxy")?
        .display()
        .to_string();
    let text = format!(
        "global\n    maxconn 2000\ndefaults\n    mode http\n    timeout connect 10s\n    timeout client 1h\n    \
         timeout server 30s\n    timeout http-keep-alive 1h\nfrontend front\n    bind {}\n    default_backend back\n\
         backend back\n    server one {}\n",
        site.address, site.backend
    );
    let file = site.write("haproxy.cfg", &text)?;
    Ok([&program, "-Ws", "-f", &file].map(str::to_owned).into())
}

fn postgresql_command(site: &ServerSetup<'_>) -> Result<Vec<String>> {
    let bin = newest_entry("/usr/lib/postgresql")
        .context("PostgreSQL is missing; install it with `apt-get install postgresql`")?;
    let data = site.folder.join("data").display().to_string();
    let run_as = [
        "setpriv",
        "--reuid=postgres",
        "--regid=postgres",
        "--clear-groups",
    ];
    fs::create_dir(&data)?;
    let owner = Command::new("chown")
        .args(["postgres:postgres", &data])
        .status()?;
    ensure!(
        owner.success(),
        "chown to postgres:postgres failed; is the user postgres missing?"
    );
    let mut make = Command::new(run_as[0]);
    make.args(&run_as[1..]).arg(format!("{bin}/bin/initdb"));
    make.args(["-D", &data, "-U", "postgres", "-A", "trust", "--no-sync"]);
    make.current_dir(&data);
    run_build(&mut make)?;
    let mut rules = fs::OpenOptions::new()
        .append(true)
        .open(format!("{data}/pg_hba.conf"))?;
    rules.write_all(b"host all all all trust\n")?;
    let mut words: Vec<String> = run_as.map(str::to_owned).into();
    words.extend([format!("{bin}/bin/postgres"), "-D".into(), data]);
    let options = [
        format!("listen_addresses={}", site.address.ip()),
        format!("port={}", site.address.port()),
        "unix_socket_directories=".into(),
        "max_connections=200".into(),
        "fsync=off".into(),
    ];
    words.extend(options.into_iter().flat_map(|option| ["-c".into(), option]));
    Ok(words)
}

/// The FastCGI server is a child of the HTTP server, so that both are in one process tree.
fn php_fpm_command(site: &ServerSetup<'_>) -> Result<Vec<String>> {
    let folder = site.folder.display();
    let versions = fs::read_dir("/etc/php").into_iter().flatten().flatten();
    let version = versions
        .filter_map(|entry| entry.file_name().into_string().ok())
        .max();
    let version = version.context("PHP is missing; install it with `apt-get install php-fpm`")?;
    let fpm = find_system_program(&format!("php-fpm{version}"), "php-fpm")?;
    site.write(
        "index.php",
        "<?php $path = $_SERVER['REQUEST_URI']; header('Content-Length: ' . strlen($path)); echo $path;\n",
    )?;
    let text = format!(
        "[global]\ndaemonize = no\nerror_log = {folder}/fpm.log\n[www]\nuser = www-data\ngroup = www-data\n\
         listen = {folder}/fpm.sock\nlisten.mode = 0666\npm = dynamic\npm.max_children = 8\npm.start_servers = 2\n\
         pm.min_spare_servers = 1\npm.max_spare_servers = 3\n"
    );
    let file = site.write("fpm.conf", &text)?;
    let location = format!(
        "fastcgi_pass unix:{folder}/fpm.sock; fastcgi_param SCRIPT_FILENAME {folder}/index.php; \
         fastcgi_param REQUEST_URI $request_uri; fastcgi_param REQUEST_METHOD $request_method;"
    );
    let nginx = nginx_command(site, 1, &location)?;
    let script = format!("{} -y {file} -F & exec \"$@\"", fpm.display());
    let mut words: Vec<String> = ["sh", "-c", &script, "sh"].map(str::to_owned).into();
    words.extend(nginx);
    Ok(words)
}

fn jvm_command(site: &ServerSetup<'_>) -> Result<Vec<String>> {
    let folder = site.folder.display().to_string();
    let file = site.write("Echo.java", holdfast_testbed::programs::ECHO_JAVA)?;
    let compiler = find_system_program("javac", "openjdk-17-jdk-headless")?;
    run_build(Command::new(compiler).args(["-d", &folder, &file]))?;
    let program = find_system_program("java", "openjdk-17-jre-headless")?
        .display()
        .to_string();
    let (host, port) = (
        site.address.ip().to_string(),
        site.address.port().to_string(),
    );
    let words = [&program, "-Xmx128m", "-cp", &folder, "Echo", &host, &port];
    Ok(words.map(str::to_owned).into())
}

fn go_command(site: &ServerSetup<'_>) -> Result<Vec<String>> {
    let file = site.write("http.go", holdfast_testbed::programs::HTTP_GO)?;
    let program = site.folder.join("http").display().to_string();
    let mut compile = Command::new(find_system_program("go", "golang-go")?);
    compile.args(["build", "-o", &program, &file]);
    // Builds without modules and downloads no other Go version.
    compile.envs([("GO111MODULE", "off"), ("GOTOOLCHAIN", "local")]);
    run_build(&mut compile)?;
    Ok(vec![program, site.address.to_string()])
}

impl ServerSetup<'_> {
    fn write(&self, name: &str, text: &str) -> Result<String> {
        let path = self.folder.join(name);
        fs::write(&path, text)?;
        Ok(path.display().to_string())
    }
}

/// Returns the ids of the users that the servers run as, if these users exist.
pub(super) fn server_user_ids() -> Vec<i64> {
    let names = ["root", "www-data", "postgres"];
    let known = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let numbers = known.lines().filter_map(|line| {
        let mut words = line.split(':');
        let name = words.next()?;
        let number = words.nth(1)?.parse().ok()?;
        names.contains(&name).then_some(number)
    });
    numbers.collect()
}

/// Returns the entry of a folder with the highest name.
fn newest_entry(folder: &str) -> Option<String> {
    let entries = fs::read_dir(folder).ok()?.flatten();
    let paths = entries.map(|entry| entry.path().display().to_string());
    paths.max()
}

fn run_build(command: &mut Command) -> Result<()> {
    let output = command
        .output()
        .context("run a program that prepares the server")?;
    let messages = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {messages}");
    Ok(())
}
