//! The files of a node that joins or creates a group.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::Write;
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use holdfast_api::ca::{NodeKey, check_name};
use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

/// The daemon's default for `state_dir`.
const STATE_DIR: &str = "/var/lib/holdfast";

/// Key, certificates and configuration of a node.
pub struct NodeFiles {
    state_dir: PathBuf,
    dir: PathBuf,
    name: String,
}

impl NodeFiles {
    /// Returns the files of node `name`, whose key and certificates are in the folder `tls` of `state_dir`.
    ///
    /// # Errors
    /// `name` is not a name.
    pub fn new(state_dir: &Path, name: &str) -> Result<NodeFiles> {
        check_name(name)?;
        Ok(NodeFiles {
            state_dir: state_dir.to_owned(),
            dir: state_dir.join("tls"),
            name: name.to_owned(),
        })
    }

    /// Returns the node's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the directory of key and certificates.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the state directory for the configuration; none if it is the default.
    pub fn state_dir_if_unusual(&self) -> Option<PathBuf> {
        (self.state_dir != Path::new(STATE_DIR)).then(|| self.state_dir.clone())
    }

    /// Returns the path of the node's certificate.
    pub fn certificate(&self) -> PathBuf {
        self.dir.join(format!("{}.pem", self.name))
    }

    /// Returns the path of the node's certificate request.
    pub fn request(&self) -> PathBuf {
        self.dir.join(format!("{}.csr", self.name))
    }

    /// Returns the key of an earlier attempt, or makes a new one.
    ///
    /// # Errors
    /// The node has a certificate already, or the directory cannot be written.
    pub fn key_for_join(&self) -> Result<NodeKey> {
        let certificate = self.certificate();
        ensure!(
            !certificate.exists(),
            "{} exists: {} has a certificate already; move the file away to join anew",
            certificate.display(),
            self.name
        );
        let path = self.dir.join(format!("{}.key", self.name));
        if path.exists() {
            let pem = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            return NodeKey::from_pem(&pem).with_context(|| path.display().to_string());
        }
        let key = NodeKey::generate()?;
        write_new(&path, &key.to_pem())?;
        Ok(key)
    }

    /// Writes the node's certificate.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn write_certificate(&self, pem: &str) -> Result<()> {
        self.write(&format!("{}.pem", self.name), pem)
    }

    /// Writes a file into the directory of key and certificates, in place of a former one.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn write(&self, file: &str, content: &str) -> Result<()> {
        let path = self.dir.join(file);
        let partial = self.dir.join(format!("{file}.partial"));
        let _ = fs::remove_file(&partial);
        write_new(&partial, content)?;
        fs::rename(&partial, &path).with_context(|| path.display().to_string())
    }

    /// Reads a file in the directory of key and certificates.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(&self, file: &str) -> Result<String> {
        let path = self.dir.join(file);
        let context = || {
            format!(
                "{}: no join has begun here as node {}; begin with --token, or name the node with --name",
                path.display(),
                self.name
            )
        };
        fs::read_to_string(&path).with_context(context)
    }

    /// Writes the configuration, which must not exist.
    ///
    /// # Errors
    /// The file exists or cannot be written.
    pub fn write_config(&self, path: &Path, text: &str) -> Result<()> {
        write_new(path, text)
    }
}

/// Writes a new file that only this user can read, and makes it durable. Its directory is made if necessary.
fn write_new(path: &Path, content: &str) -> Result<()> {
    let describe = || path.display().to_string();
    if let Some(directory) = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
    {
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700);
        builder
            .create(directory)
            .with_context(|| directory.display().to_string())?;
    }
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let mut file = options.open(path).with_context(describe)?;
    file.write_all(content.as_bytes()).with_context(describe)?;
    file.sync_all().with_context(describe)
}

/// Returns the first label of the host's name.
///
/// # Errors
/// The host has no name, or one that no node can have.
pub fn host_name() -> Result<String> {
    let name = nix::unistd::gethostname().context("the host's name")?;
    let name = name.to_string_lossy().to_ascii_lowercase();
    let label = name.split('.').next().unwrap_or_default().to_owned();
    check_name(&label)
        .with_context(|| format!("the host's name `{name}` does not fit; use --name"))?;
    Ok(label)
}

/// Returns the network device that has `address`.
///
/// # Errors
/// No device has the address.
pub fn interface_of(address: IpAddr) -> Result<String> {
    let found = local_addresses()?
        .into_iter()
        .find(|(_, own, _)| *own == address);
    found
        .map(|(device, _, _)| device)
        .ok_or_else(|| anyhow!("no network device has {address}; name one with --interface"))
}

/// Returns the only address of this host that other hosts can reach: IPv4 before IPv6, link-local and loopback addresses
/// excepted. With `interface`, only that device counts.
///
/// # Errors
/// There is none, or there are several.
pub fn own_address(interface: Option<&str>) -> Result<IpAddr> {
    let is_wanted = |(device, address, is_loopback): &(String, IpAddr, bool)| {
        let is_link_local = match address {
            IpAddr::V4(address) => address.is_link_local(),
            IpAddr::V6(address) => address.is_unicast_link_local(),
        };
        let is_device = interface.is_none_or(|interface| interface == device);
        is_device && !is_loopback && !is_link_local
    };
    let mut addresses: Vec<IpAddr> = (local_addresses()?.into_iter())
        .filter(is_wanted)
        .map(|(_, address, _)| address)
        .collect();
    if addresses.iter().any(IpAddr::is_ipv4) {
        addresses.retain(IpAddr::is_ipv4);
    }
    match addresses[..] {
        [address] => Ok(address),
        [] => Err(anyhow!(
            "this host has no address that others can reach; name one with --address"
        )),
        _ => {
            let list: Vec<String> = addresses.iter().map(ToString::to_string).collect();
            Err(anyhow!(
                "this host has several addresses ({}); choose one with --address",
                list.join(", ")
            ))
        }
    }
}

/// Returns device, address, and whether the device is the loopback device.
fn local_addresses() -> Result<Vec<(String, IpAddr, bool)>> {
    let addresses = getifaddrs().context("list the network devices")?;
    let entry = |entry: nix::ifaddrs::InterfaceAddress| {
        let address = entry.address?;
        let ip = match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
            (Some(v4), _) => IpAddr::V4(v4.ip()),
            (_, Some(v6)) => IpAddr::V6(v6.ip()),
            _ => return None,
        };
        let is_loopback = entry.flags.contains(InterfaceFlags::IFF_LOOPBACK);
        Some((entry.interface_name, ip, is_loopback))
    };
    Ok(addresses.filter_map(entry).collect())
}
