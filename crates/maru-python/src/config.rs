//! A dict or a file as the engine's configuration.

use std::path::PathBuf;

use maru_transfer::config::{Config, KernelSource};
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyList, PyMapping, PyString, PyTuple};

use crate::args::{self, a, type_name};
use crate::errors::{Fault, Result, guard};

/// `None` (the defaults), a dict, or the path of a TOML file.
pub(crate) fn read(object: Option<&Bound<'_, PyAny>>, foreign: &[String]) -> Result<Config> {
    let Some(object) = object.filter(|o| !o.is_none()) else { return Ok(Config::default()) };
    if let Ok(mapping) = object.cast::<PyMapping>() {
        let foreign: Vec<&str> = foreign.iter().map(String::as_str).collect();
        return Ok(Config::from_dict_beside(&table(mapping)?, &foreign)?);
    }
    match object.extract::<PathBuf>() {
        Ok(path) => Ok(Config::from_file(path)?),
        Err(_) => {
            let found = a(&type_name(object));
            Err(Fault::wrong_type(format!(
                "the configuration is {found}; a dict or the path of a TOML file is needed"
            ))
            .into())
        }
    }
}

fn config_error(message: String) -> Fault {
    Fault { kind: "config", message }
}

/// The keys that are ours; the rest of a foreign dict may hold anything.
fn table(mapping: &Bound<'_, PyMapping>) -> Result<toml::Table> {
    let mut table = toml::Table::new();
    for item in mapping.items()?.iter() {
        let (key, value) = item.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>()?;
        let Ok(key) = key.extract::<String>() else { continue };
        let ours = Config::is_dict_key(&key);
        match self::value(&value, &key, 0) {
            Ok(value) => {
                table.insert(key, value);
            }
            Err(e) if ours => return Err(e),
            // Only its name is of interest, for a hint at a misspelt key.
            Err(_) => {
                table.insert(key, toml::Value::Boolean(false));
            }
        }
    }
    Ok(table)
}

fn value(object: &Bound<'_, PyAny>, key: &str, depth: usize) -> Result<toml::Value> {
    if depth > 8 {
        return Err(config_error(format!("`{key}` is nested more than 8 levels deep")).into());
    }
    if object.is_instance_of::<PyBool>() {
        return Ok(toml::Value::Boolean(object.extract()?));
    }
    if object.is_instance_of::<PyString>() {
        return Ok(toml::Value::String(object.extract()?));
    }
    if object.is_instance_of::<PyFloat>() {
        return Ok(toml::Value::Float(object.extract()?));
    }
    if let Ok(dict) = object.cast::<PyDict>() {
        let mut inner = toml::Table::new();
        for (k, v) in dict.iter() {
            let Ok(name) = k.extract::<String>() else {
                return Err(config_error(format!(
                    "`{key}` has a key that is {}, text is needed",
                    a(&type_name(&k))
                ))
                .into());
            };
            let path = format!("{key}.{name}");
            inner.insert(name, value(&v, &path, depth + 1)?);
        }
        return Ok(toml::Value::Table(inner));
    }
    if object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>() {
        let mut items = Vec::new();
        for (i, item) in object.try_iter()?.enumerate() {
            items.push(value(&item?, &format!("{key}[{i}]"), depth + 1)?);
        }
        return Ok(toml::Value::Array(items));
    }
    match object.extract::<i64>() {
        Ok(number) => return Ok(toml::Value::Integer(number)),
        Err(e) if e.is_instance_of::<PyOverflowError>(object.py()) => {
            return Err(config_error(format!("`{key}` is {}, which is beyond 64 bits", object.str()?)).into());
        }
        Err(_) => {}
    }
    if object.hasattr("__fspath__")? {
        let path: PathBuf = object.extract()?;
        return Ok(toml::Value::String(path.display().to_string()));
    }
    let found = if object.is_none() { "None".to_owned() } else { a(&type_name(object)) };
    Err(config_error(format!(
        "`{key}` is {found}; leave the key out, or give a bool, int, text, list or dict"
    ))
    .into())
}

/// What `resolve_ops` needs to know of a configuration.
#[pyfunction]
#[pyo3(signature = (config=None, foreign=None))]
pub(crate) fn read_config<'py>(
    py: Python<'py>,
    config: Option<&Bound<'py, PyAny>>,
    foreign: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    guard(py, || {
        let config = read(config, &args::texts(foreign, "foreign")?)?;
        let dict = PyDict::new(py);
        let source = match config.kernel_source {
            KernelSource::Lmcache => "lmcache",
            _ => "maru",
        };
        dict.set_item("backend", config.transfer.backend.to_string())?;
        dict.set_item("device", config.transfer.device.to_string())?;
        dict.set_item("kernel_source", source)?;
        dict.set_item("enable_fused_load", config.transfer.enable_fused_load)?;
        let warnings: Vec<String> = config.warnings().iter().map(ToString::to_string).collect();
        dict.set_item("warnings", warnings)?;
        dict.set_item("toml", config.to_toml()?)?;
        Ok(dict)
    })
}
