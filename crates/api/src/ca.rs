//! The group's own certificate authority: a directory of files, all mode 0600.
//!
//! | file | content |
//! | --- | --- |
//! | `ca.pem`, `ca.key` | the authority's certificate and private key |
//! | `ca.crl` | its revocation list, empty at first |
//! | `serials.log` | a line for each certificate issued or revoked |
//! | `NODE.pem`, `NODE.key` | a node's certificate and private key |
//!
//! Keys are ECDSA on P-256. A node's certificate carries its identity as the DNS name [`node_dns_name`] and is valid at
//! both ends of a TLS connection. No file is ever overwritten except the revocation list, which is replaced as a whole.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevocationReason,
    RevokedCertParams, SanType, SerialNumber, date_time_ymd,
};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
const AUTHORITY_DAYS: u32 = 3650;

/// Default validity of a node's certificate, in days.
pub const NODE_DAYS: u32 = 825;

/// Maximum lag of a node's clock behind the authority's.
const CLOCK_TOLERANCE: Duration = DAY;

/// Returns the DNS name of node `name` in its certificate: `NAME.node`.
pub fn node_dns_name(name: &str) -> String {
    format!("{name}.node")
}

/// An error of the certificate authority.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    /// A file exists that must not be overwritten.
    #[error("{} exists already and is not overwritten; move it away or use another directory", .0.display())]
    Exists(PathBuf),
    /// A file cannot be read or written.
    #[error("{}: {source}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The name is not allowed for a node or group.
    #[error("`{0}` is not a name; use 1 to 40 lower-case letters, digits and inner hyphens")]
    Name(String),
    /// The node has no valid certificate to revoke.
    #[error("no certificate of `{0}` is in force; serials.log lists what was issued")]
    NotIssued(String),
    /// A line of the log is malformed.
    #[error("{}:{line}: not a line of the log; restore the file", .path.display())]
    Log {
        /// The log.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
    },
    /// Creating or reading a certificate failed.
    #[error("certificate: {0}")]
    Certificate(#[from] rcgen::Error),
}

/// Files of a certificate just issued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IssuedFiles {
    /// The certificate (PEM).
    pub cert: PathBuf,
    /// The private key (PEM).
    pub key: PathBuf,
    /// The certificate's serial number in hexadecimal.
    pub serial: String,
}

/// A certificate authority that can issue and revoke certificates.
pub struct CertificateAuthority {
    dir: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

impl CertificateAuthority {
    /// Creates an authority for the group `group` in `dir`, which is created if necessary.
    ///
    /// # Errors
    /// `dir` holds an authority already, cannot be written, or `group` is not a name.
    pub fn init(dir: &Path, group: &str) -> Result<CertificateAuthority, CaError> {
        check_name(group)?;
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .map_err(file_error(dir))?;
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, format!("Holdfast group {group}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.serial_number = Some(serial_from_key(&key));
        set_validity(&mut params, AUTHORITY_DAYS);
        let certificate = params.self_signed(&key)?;
        // Create the key first: the process that creates the key is the one that writes the rest.
        create_file(&dir.join("ca.key"), &key.serialize_pem())?;
        create_file(&dir.join("ca.pem"), &certificate.pem())?;
        create_file(&dir.join("serials.log"), "")?;
        let authority = CertificateAuthority {
            dir: dir.to_owned(),
            issuer: Issuer::new(params, key),
        };
        authority.write_crl(&[])?;
        Ok(authority)
    }

    /// Opens the authority in `dir`.
    ///
    /// # Errors
    /// Its files are missing or damaged.
    pub fn open(dir: &Path) -> Result<CertificateAuthority, CaError> {
        let key = KeyPair::from_pem(&read(&dir.join("ca.key"))?)?;
        let certificate = read(&dir.join("ca.pem"))?;
        Ok(CertificateAuthority {
            dir: dir.to_owned(),
            issuer: Issuer::from_ca_cert_pem(&certificate, key)?,
        })
    }

    /// Issues a certificate for node `node`, valid for `days` days; `addresses` are added to its names.
    ///
    /// # Errors
    /// `node` is not a name, or its files exist already (revoke moves them aside).
    pub fn issue(
        &self,
        node: &str,
        addresses: &[IpAddr],
        days: u32,
    ) -> Result<IssuedFiles, CaError> {
        check_name(node)?;
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, format!("node:{node}"));
        let dns_name = Ia5String::try_from(node_dns_name(node))?;
        params.subject_alt_names = vec![SanType::DnsName(dns_name)];
        let ips = addresses.iter().copied().map(SanType::IpAddress);
        params.subject_alt_names.extend(ips);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        params.use_authority_key_identifier_extension = true;
        params.serial_number = Some(serial_from_key(&key));
        set_validity(&mut params, days);
        let certificate = params.signed_by(&key, &self.issuer)?;
        let issued = IssuedFiles {
            cert: self.dir.join(format!("{node}.pem")),
            key: self.dir.join(format!("{node}.key")),
            serial: hex(&serial_from_key(&key).to_bytes()),
        };
        if issued.cert.exists() {
            return Err(CaError::Exists(issued.cert));
        }
        create_file(&issued.key, &key.serialize_pem())?;
        // Log before the certificate can be used, so that every used certificate can be revoked.
        self.log("issued", &issued.serial, node)?;
        create_file(&issued.cert, &certificate.pem())?;
        Ok(issued)
    }

    /// Revokes every valid certificate of `node`: the revocation list is replaced, and the node's files are renamed
    /// (`NODE.revoked-SERIAL.pem`, `.key`). Returns the serial numbers.
    ///
    /// # Errors
    /// No certificate of `node` is valid, or a file cannot be written.
    pub fn revoke(&self, node: &str) -> Result<Vec<String>, CaError> {
        check_name(node)?;
        let log = self.read_log()?;
        let revocations: Vec<&LogEntry> = log.iter().filter(|entry| entry.is_revocation).collect();
        let serials: Vec<String> = log
            .iter()
            .filter(|entry| entry.node == node && !entry.is_revocation)
            .filter(|entry| revocations.iter().all(|other| other.serial != entry.serial))
            .map(|entry| entry.serial.clone())
            .collect();
        let Some(last) = serials.last() else {
            return Err(CaError::NotIssued(node.to_owned()));
        };
        for serial in &serials {
            self.log("revoked", serial, node)?;
        }
        self.write_crl(&self.read_log()?)?;
        for extension in ["pem", "key"] {
            let from = self.dir.join(format!("{node}.{extension}"));
            let to = self.dir.join(format!("{node}.revoked-{last}.{extension}"));
            match fs::rename(&from, &to) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(file_error(&from)(error));
                }
                _ => {}
            }
        }
        Ok(serials)
    }

    /// Replaces the revocation list by one with all revocations in `log`.
    fn write_crl(&self, log: &[LogEntry]) -> Result<(), CaError> {
        let revoked: Vec<RevokedCertParams> = log
            .iter()
            .filter(|entry| entry.is_revocation)
            .map(|entry| RevokedCertParams {
                serial_number: SerialNumber::from_slice(&entry.serial_bytes),
                revocation_time: date_time_ymd(1970, 1, 1) + entry.time,
                reason_code: Some(RevocationReason::Unspecified),
                invalidity_date: None,
            })
            .collect();
        let now = since_epoch();
        let params = CertificateRevocationListParams {
            this_update: date_time_ymd(1970, 1, 1) + now.saturating_sub(CLOCK_TOLERANCE),
            next_update: date_time_ymd(1970, 1, 1) + now + DAY * AUTHORITY_DAYS,
            crl_number: SerialNumber::from_slice(&(1 + revoked.len() as u64).to_be_bytes()),
            issuing_distribution_point: None,
            revoked_certs: revoked,
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let path = self.dir.join("ca.crl");
        let partial = self.dir.join("ca.crl.partial");
        let pem = params.signed_by(&self.issuer)?.pem()?;
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let written = options.open(&partial).and_then(|mut file| {
            file.write_all(pem.as_bytes())?;
            file.sync_all()
        });
        written
            .and_then(|()| fs::rename(&partial, &path))
            .map_err(file_error(&path))
    }

    fn log(&self, action: &str, serial: &str, node: &str) -> Result<(), CaError> {
        let path = self.dir.join("serials.log");
        let line = format!("{action} {serial} {node} {}\n", since_epoch().as_secs());
        OpenOptions::new()
            .append(true)
            .open(&path)
            .and_then(|mut file| {
                file.write_all(line.as_bytes())?;
                file.sync_all()
            })
            .map_err(file_error(&path))
    }

    fn read_log(&self) -> Result<Vec<LogEntry>, CaError> {
        let path = self.dir.join("serials.log");
        let text = read(&path)?;
        let parse = |(number, line)| {
            LogEntry::parse(line).ok_or_else(|| CaError::Log {
                path: path.clone(),
                line: number + 1,
            })
        };
        text.lines().enumerate().map(parse).collect()
    }
}

/// A line of the log: `issued|revoked SERIAL NODE SECONDS`.
struct LogEntry {
    is_revocation: bool,
    serial: String,
    serial_bytes: Vec<u8>,
    node: String,
    time: Duration,
}

impl LogEntry {
    fn parse(line: &str) -> Option<LogEntry> {
        let mut fields = line.split(' ');
        let is_revocation = match fields.next()? {
            "issued" => false,
            "revoked" => true,
            _ => return None,
        };
        let serial = fields.next()?.to_owned();
        let entry = LogEntry {
            is_revocation,
            serial_bytes: unhex(&serial)?,
            serial,
            node: fields.next()?.to_owned(),
            time: Duration::from_secs(fields.next()?.parse().ok()?),
        };
        fields.next().is_none().then_some(entry)
    }
}

/// Derives a serial number from the public key: as unique as the key, positive and of fixed length (RFC 5280, 4.1.2.2).
fn serial_from_key(key: &KeyPair) -> SerialNumber {
    // An uncompressed point starts with a constant byte; its coordinates follow.
    let mut bytes = key.public_key_raw()[1..17].to_vec();
    bytes[0] = bytes[0] & 0x7f | 0x40;
    SerialNumber::from_slice(&bytes)
}

fn set_validity(params: &mut CertificateParams, days: u32) {
    let now = date_time_ymd(1970, 1, 1) + since_epoch();
    params.not_before = now - CLOCK_TOLERANCE;
    params.not_after = now + DAY * days;
}

fn since_epoch() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

/// Checks that a name is one label of a domain name (the daemon's configuration has the same rule).
fn check_name(name: &str) -> Result<(), CaError> {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let outside = name.starts_with('-') || name.ends_with('-');
    // A node named `ca` would collide with the authority's files.
    if name.is_empty() || name.len() > 40 || !name.chars().all(allowed) || outside || name == "ca" {
        return Err(CaError::Name(name.to_owned()));
    }
    Ok(())
}

/// Writes a new file of mode 0600 and makes it durable.
fn create_file(path: &Path, content: &str) -> Result<(), CaError> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let mut file: File = options.open(path).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => CaError::Exists(path.to_owned()),
        _ => file_error(path)(error),
    })?;
    file.write_all(content.as_bytes())
        .and_then(|()| file.sync_all())
        .map_err(file_error(path))
}

fn read(path: &Path) -> Result<String, CaError> {
    fs::read_to_string(path).map_err(file_error(path))
}

fn file_error(path: &Path) -> impl Fn(io::Error) -> CaError {
    let path = path.to_owned();
    move |source| CaError::File {
        path: path.clone(),
        source,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(2) || !text.is_ascii() {
        return None;
    }
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&text[at..at + 2], 16).ok())
        .collect()
}
