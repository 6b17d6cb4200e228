"""What DeepSeek's weights meet: as in every family, see models/common/activations.py."""

from rocmega.models.common.activations import ACTIVATIONS as ACTIVATIONS
from rocmega.models.common.activations import choose as choose
